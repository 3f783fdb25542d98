// The protocol of a step as a model. Host, supervisor and runners are small machines. Their steps are the
// single accesses to shared memory that the real processes make (engine/client/stepper.cpp,
// engine/manager/supervisor.cpp, engine/runner/runner.cpp, engine/session/reduction.cpp,
// engine/session/parameter_update.cpp, engine/session/attempt.cpp). Each process can die between any two
// steps.
//
// The transitions of the step word are the real functions on a real atomic, and cursors go through the real
// encoding. The rest is as small as it can be and still go wrong. A committed attempt changes much; the model
// keeps only how many attempts each part has counted. A chunk of the master and its undo image have two
// halves that are written one after the other, and a state copy is torn while it is written.
//
// In an inner step a runner reads the whole master, in two halves that others may change in between, and what
// it has applied is gone with it. The host does not go back to an earlier state here: it is enough that no
// runner votes that lacks a step.
//
// Or the session makes the update: each rank has a slice of the parameters, of one chunk with two halves.
//
// The model accumulates, has the policy restart, and makes two attempts. It has no time: what a deadline
// does may happen at any moment, or (`patient`) never. A waiting process looks again at least every 20 ms, so
// in the model it goes on as soon as it can.
#pragma once

#include <cstdint>
#include <string>

#include "explorer.hpp"
#include "protocol_state.hpp"

namespace accelmgr::session::model {

/// Each value is one wrong turn of the protocol, which the explorer must find.
enum class Mutation {
  none,
  abort_flips_the_index,
  abort_of_a_committed_attempt,
  slice_taken_from_the_living,
  replacement_before_the_attempt_is_closed,
  recovery_without_undo,
  in_flight_before_the_image_is_saved,
  vote_before_the_copies_are_written,
  close_before_all_slices_are_finished,
  host_finishes_beside_living_runners,
  state_kept_after_an_abort,
  slice_of_the_dead_left,
  replacement_whose_pidfd_nobody_holds,
  // Of inner steps.
  applied_before_the_attempt_is_closed,
  replacement_without_the_steps_before,
  host_changes_what_is_applied,
  // Of updates in the session.
  update_before_all_slices_are_reduced,
  update_in_flight_before_the_image_is_written,
  update_computed_again,
  close_before_all_slices_are_updated,
  update_of_the_dead_left,
};

class ProtocolModel {
 public:
  struct Options {
    int ranks = 2;   ///< Up to 3.
    int chunks = 2;  ///< Chunks of each slice; up to 2.
    int deaths = 2;  ///< Up to 3. The death of the fork server, which takes all runners along, counts as one.
    bool patient = false;       ///< Nothing happens because of a deadline.
    bool host_dies = true;      ///< The host may die; to other processes a dead host just halts.
    bool private_steps = true;  ///< Steps that no other process sees are taken one by one, not joined.
    bool inner = false;         ///< Runners apply the mean gradient themselves.
    bool updates = false;       ///< The session applies it.
    Mutation mutation = Mutation::none;
  };
  using State = model::State;

  explicit ProtocolModel(const Options& options) : options_(options) {}

  State initial() const;
  void steps(const State& state, Steps<State>& out) const;
  const char* wrong(const State& state) const;
  bool may_rest(const State& state) const;
  std::string text(const State& state) const;

 private:
  static constexpr std::uint32_t attempts = 2;

  RankMask all() const noexcept { return all_ranks(options_.ranks); }
  bool is(Mutation mutation) const noexcept { return options_.mutation == mutation; }
  bool lost(const State& s, int rank) const noexcept;

  void take_private_steps(State& s, int rank) const;
  void start_steps(const State& s, int rank, Steps<State>& out) const;
  void vote_steps(const State& s, int rank, Steps<State>& out) const;
  void apply_steps(const State& s, int rank, Steps<State>& out) const;
  void runner_steps(const State& s, int rank, Steps<State>& out) const;
  void compute_steps(const State& s, int rank, Steps<State>& out) const;
  void supervisor_steps(const State& s, Steps<State>& out) const;
  void watch_steps(const State& s, Steps<State>& out) const;
  void host_steps(const State& s, Steps<State>& out) const;
  void wait_steps(const State& s, Steps<State>& out) const;
  void await_applied_steps(const State& s, Steps<State>& out) const;
  void end_steps(const State& s, Steps<State>& out) const;
  void death_steps(const State& s, Steps<State>& out) const;

  /// Makes the next step of a slice, or of closing, and sends the process to `afterwards` when that part is
  /// done. Returns null if `p` stands elsewhere. `p` is a process of `s`.
  const char* slice_step(State& s, Process& p, Pc afterwards) const;
  const char* update_step(State& s, Process& p, Pc afterwards) const;
  const char* close_step(State& s, Process& p, Pc afterwards) const;
  bool all_reduced(const State& s, std::uint32_t attempt) const;
  void reduce_half(State& s, const Process& p, std::uint32_t half) const;
  bool abort_word(State& s, std::uint32_t attempt, std::uint32_t author) const;

  Options options_;
};

}  // namespace accelmgr::session::model
