// The state of the protocol's model, as small as it can be: the processes, where each stands, the shared
// memory, and a few functions that look at them.
#pragma once

#include <cstdint>

#include "engine/session/attempt.hpp"
#include "modelled_word.hpp"

namespace accelmgr::session::model {

/// Where a process stands: the name of its next step.
enum class Pc : std::uint32_t {
  dead,
  // A runner starts.
  look_at_index,
  load_copies,
  mark_acknowledged,
  mark_ready,
  // A runner makes an attempt.
  idle,
  reset_cursor,
  compute,
  refuse,
  look_before_vote,
  begin_copies,
  end_copies,
  cast_vote,
  await_votes,
  restore_state,
  acknowledge,
  acknowledge_and_close,
  // It applies the gradient of an inner step.
  await_closed,
  apply_first,
  apply_second,
  // A process reduces a slice: finish_slice().
  slice_begin,
  save_first,
  save_second,
  say_in_flight,
  reduce_first,
  reduce_second,
  move_on,
  begin_publish,
  end_publish,
  slice_end,
  // A process updates a slice of parameters: ParameterUpdate::finish_slice().
  await_reduced,
  update_begin,
  update_compute,
  update_in_flight,
  copy_first,
  copy_second,
  update_end,
  // A process closes the attempt: close_if_over().
  close_look,
  close_scan,
  close_word,
  // The supervisor watches.
  watch,
  lost_look,
  lost_abort,
  lost_committed,
  spawn,
  // The host makes a step.
  gather,
  open_word,
  wait,
  abort_lost,
  abort_timeout,
  await_applied,
  give_result,
  // The host has lost the manager.
  end_all,
  end_abort,
  end_look,
  next_slice,
  next_update,
  recover,
  done,
};

/// A process and its local variables. Unused variables are zero, so that equal states have equal bytes.
struct Process {
  Pc pc : 8;
  std::uint32_t attempt : 6;
  std::uint32_t applied : 2;  ///< Inner steps that a runner has made since it has the optimizer.
  std::uint32_t rank : 4;
  std::uint32_t chunk : 4;
  std::uint32_t restore : 4;
  std::uint32_t index : 4;
};
/// The shared memory of one rank. Attempts are counted in two bits each; 3 stands for torn or wrong contents.
struct Rank {
  std::uint32_t master : 8;  ///< The rank's slice: two halves for each chunk.
  std::uint32_t undo : 4;    ///< Two halves of the undo image.
  std::uint32_t copies : 4;  ///< Buffers and generator, by index.
  std::uint32_t slab : 2;    ///< The tag: the attempt that the slab holds.
  std::uint32_t work : 2;    ///< The runner's working state.
  std::uint32_t acknowledged_attempt : 2;
  std::uint32_t state : 2;
  std::uint32_t pidfd_held : 2;  ///< The host holds the pidfd of the present process.
  std::uint32_t cursor_attempt : 2;
  std::uint32_t cursor_chunk : 2;  ///< 3: the slice is finished.
  std::uint32_t cursor_in_flight : 2;
  // Of the update: a slice of parameters is one chunk of two halves, with an image and a cursor of its own.
  std::uint32_t updated : 4;
  std::uint32_t update_image : 4;
  std::uint32_t update_attempt : 2;
  std::uint32_t update_in_flight : 1;
  std::uint32_t update_finished : 21;
};
/// Two states are equal when their bytes are equal.
struct State {
  Process runners[3];
  Process supervisor;
  Process host;
  Rank ranks[3];
  std::uint32_t word_attempt : 2;
  std::uint32_t word_index : 1;
  std::uint32_t word_closed : 1;
  std::uint32_t word_abort : 1;
  std::uint32_t word_mask : 7;
  std::uint32_t counters : 4;  ///< By index, like `result`.
  std::uint32_t result : 4;
  std::uint32_t committed : 2;  ///< Commits so far; no process reads it.
  std::uint32_t deaths : 2;
  std::uint32_t refused_to_open : 8;
};

static_assert(sizeof(Process) == 4 && sizeof(Rank) == 8 && sizeof(State) == 48);

constexpr std::uint32_t torn = 3;

// Counts of two bits, side by side.
constexpr std::uint32_t cell(std::uint32_t bits, std::uint32_t i) { return bits >> 2 * i & 3; }
constexpr std::uint32_t with_cell(std::uint32_t bits, std::uint32_t i, std::uint32_t value) {
  return (bits & ~(3u << 2 * i)) | (value & 3) << 2 * i;
}
constexpr std::uint32_t one_more(std::uint32_t count) { return count < torn ? count + 1 : torn; }

// Contents that no process may read any more become one fixed garbage value. That saves states, and a process
// that reads the value is found.
inline void forget_image(Rank& rank) { rank.undo = 15; }
inline void forget_attempt(State& s, int ranks) {
  const auto other = s.word_index ^ 1u;
  for (int rank = 0; rank < ranks; ++rank) {
    s.ranks[rank].copies = with_cell(s.ranks[rank].copies, other, torn) & 15;
    s.ranks[rank].slab = 0;
    s.ranks[rank].update_image = 15;
  }
  s.counters = with_cell(s.counters, other, torn) & 15;
  s.result = with_cell(s.result, other, torn) & 15;
}

inline void store_cursor(Rank& rank, const Cursor& cursor) {
  const auto stored = decode_cursor(encode(cursor));
  rank.cursor_attempt = stored.attempt & 3;
  rank.cursor_chunk = stored.chunk == cursor_finished ? 3 : stored.chunk & 3;
  rank.cursor_in_flight = stored.in_flight;
}

inline Cursor cursor_of(const Rank& rank) {
  return decode_cursor(encode(Cursor{.attempt = rank.cursor_attempt,
                                     .chunk = rank.cursor_chunk == 3 ? cursor_finished : rank.cursor_chunk,
                                     .in_flight = rank.cursor_in_flight != 0}));
}

inline bool is_reduced(const Rank& rank, std::uint32_t attempt) {
  const auto cursor = cursor_of(rank);
  return cursor.attempt == attempt && cursor.chunk == cursor_finished;
}
inline bool is_updated(const Rank& rank, std::uint32_t attempt) {
  return rank.update_attempt == attempt && rank.update_finished != 0;
}

constexpr std::uint32_t number(RunnerState state) { return static_cast<std::uint32_t>(state) & 3; }

inline Process standing_at(Pc pc) {
  Process p{};
  p.pc = pc;
  return p;
}

/// A runner there, with its optimizer.
inline Process standing_at(Pc pc, const Process& runner) {
  auto p = standing_at(pc);
  p.applied = runner.applied;
  return p;
}

inline void go(Process& p, Pc pc) { p.pc = pc; }

inline bool within(const Process& p, Pc first, Pc last) { return p.pc >= first && p.pc <= last; }

inline bool alive(const Process& p) { return p.pc != Pc::dead; }

inline bool over(const State& s, std::uint32_t attempt) {
  return s.word_attempt != attempt || s.word_closed != 0 || s.word_abort != 0;
}

inline void start_runner(State& s, std::uint32_t rank) {
  s.runners[rank] = standing_at(Pc::look_at_index);
  s.ranks[rank].state = number(RunnerState::starting);
  s.ranks[rank].pidfd_held = 0;
  s.ranks[rank].work = 0;
}

inline void end_runner(State& s, int rank) {
  s.runners[rank] = standing_at(Pc::dead);
  s.ranks[rank].work = 0;
}

}  // namespace accelmgr::session::model
