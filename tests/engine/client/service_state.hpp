// The state of the model of a service: its processes, where each stands, the shared memory, and what the
// service knows by itself.
#pragma once

#include <cstdint>
#include <type_traits>

#include "engine/session/modelled_word.hpp"

namespace accelmgr::client::model {

/// Where a process stands: the name of its next step.
enum class Pc : std::uint32_t {
  none,  ///< No process, or one that is of no interest any more.
  dead,
  // A runner.
  starting,
  idle,
  compute,
  await_votes,
  acknowledge,
  close_after_slice,
  // A process reduces a slice: Reduction::finish_slice().
  slice_begin,
  say_in_flight,
  reduce_first,
  reduce_second,
  slice_end,
  // The service: its supervisor and its lease, which have one thread.
  watch,
  lost_look,
  lost_abort,
  lost_committed,
  lost_close,
  leave_abort,
  leave_close,
  settle,
  // A host makes a step.
  look_at_marks,
  found,  ///< It has attached, or the gradients are zero.
  has_gradients,
  has_written,
  assemble,
  open_word,
  wait,
  close_attempt,
  abort_for_supervisor,
  abort_for_host,
  take_result,
  mark_overwritten,
  // The service is gone: Stepper::manager_lost().
  await_ends,
  end_abort,
  end_look,
  next_slice,
  end_close,
  // A host writes parameters: Handle::begin_writing() to end_writing().
  make_odd,
  mark_applied,
  write_first,
  write_second,
  count_whole,
  make_even,
  // Stepper::zero_gradients().
  mark_given_up,
  zero_first,
  zero_second,
  mark_zeroed,
  // A host leaves.
  give_up_mappings,
  say_detach,
  lingers,  ///< It has closed its socket, and keeps its mappings until it ends.
  home,
  // A thread of the service copies the parameters for a checkpoint.
  copy_first,
  copy_second,
};

enum class Job : std::uint32_t {
  none,  ///< A host with a process of its own.
  step,
  save,
};

/// A process and its local variables. Unused variables are zero, so that equal states have equal bytes.
struct Process {
  Pc pc : 6;
  std::uint32_t stopped : 1;
  std::uint32_t attempt : 2;
  std::uint32_t rank : 2;
  // Of a host.
  Job job : 2;
  std::uint32_t lease : 3;
  std::uint32_t left : 2;        ///< What it has found: LeftGradients.
  std::uint32_t told : 1;        ///< That parameters are half written, and it has not written all of them.
  std::uint32_t overwrites : 1;  ///< Handle::State::overwrites.
  std::uint32_t accumulate : 1;  ///< What it wants of the step.
  std::uint32_t whole : 1;       ///< The write under way is of all parameters, and marked as whole.
  std::uint32_t closed : 1;      ///< It has closed its socket.
  std::uint32_t detached : 1;    ///< It has said Detach.
  std::uint32_t beside : 1;      ///< The checkpoint does not take the place of a good one.
  std::uint32_t copied : 3;      ///< The first half of the parameters.
  std::uint32_t unused : 4;
};

// A set of attempts: bit i for attempt i + 1. Gradients and parameters are the sets whose sum they hold.

/// The shared memory of one rank: its slice of the master gradients, which is one chunk with two halves.
struct Rank {
  std::uint32_t first : 3;
  std::uint32_t second : 3;
  std::uint32_t undo_first : 3;
  std::uint32_t undo_second : 3;
  std::uint32_t cursor_attempt : 2;
  std::uint32_t in_flight : 1;
  std::uint32_t finished : 1;
  std::uint32_t acknowledged_attempt : 2;
  std::uint32_t ready : 1;
  std::uint32_t lost : 1;
  std::uint32_t pidfd_held : 1;  ///< The host holds the pidfd of the present process.
  std::uint32_t unused : 11;
};

/// Two states are equal when their bytes are equal.
struct State {
  Process runners[2];
  Process service;
  Process hosts[2];  ///< The second place is used only if two of them have the session mapped.
  Rank ranks[2];
  // Shared memory.
  std::uint32_t word_attempt : 2;
  std::uint32_t word_index : 1;
  std::uint32_t word_closed : 1;
  std::uint32_t word_abort : 1;
  std::uint32_t word_mask : 7;
  std::uint32_t steps : 2;
  std::uint32_t accumulate : 1;  ///< The request's.
  std::uint32_t lease : 3;
  std::uint32_t zeroed_step : 2;
  std::uint32_t applied_step : 2;
  std::uint32_t is_odd : 1;         ///< The version of the parameters.
  std::uint32_t written_whole : 1;  ///< HostControl::writes has changed since the host was admitted.
  std::uint32_t parameters_first : 3;
  std::uint32_t parameters_second : 3;
  std::uint32_t unused : 2;
  // What the service knows.
  std::uint32_t driven : 1;
  std::uint32_t leaving : 1;
  std::uint32_t holder : 1;  ///< The place of the host that has the lease.
  std::uint32_t has_detached : 1;
  std::uint32_t half_written : 1;
  std::uint32_t hosts_admitted : 2;
  std::uint32_t steps_asked_for : 1;
  std::uint32_t saves_asked_for : 1;
  // What no process reads.
  std::uint32_t deaths : 2;
  std::uint32_t stops : 2;
  std::uint32_t owed : 3;  ///< Committed gradients that their host, which lives, has not applied yet.
  std::uint32_t stepped : 1, wrote : 1;  ///< The host has, since it was admitted. For mutations.
  std::uint32_t twice : 1, torn_gradient : 1, step_on_half : 1, save_of_half : 1, refused : 1;
  std::uint32_t unused_too : 9;
};

static_assert(sizeof(Process) == 4 && sizeof(Rank) == 4 && sizeof(State) == 36);
static_assert(std::has_unique_object_representations_v<State>, "no padding");

using session::change_word;
using session::word_of;

inline Process standing_at(Pc pc) {
  Process p{};
  p.pc = pc;
  return p;
}
inline void go(Process& p, Pc pc) { p.pc = pc; }
inline bool alive(const Process& p) { return p.pc != Pc::none && p.pc != Pc::dead; }

}  // namespace accelmgr::client::model
