// A service as a model: its hosts, the service, and its runners. They are of different users, so a host ends
// nobody. Their steps are the single accesses to shared memory that the real processes make
// (engine/client/handle.cpp, engine/client/stepper.cpp, engine/manager/lease.cpp,
// engine/manager/failure_recovery.cpp, engine/service/actions.cpp). Each process can be stopped, continued or
// killed between any two steps.
//
// The transitions of the step word, next_action() and left_by() are the real functions. What
// engine/session/protocol_model.hpp proves of an attempt is left out here: votes, state copies and counters
// are one step, a slice has one chunk, and an image is saved and put back in one step. Gradients and
// parameters are the sets of attempts whose gradients they hold; the parameters have two halves.
//
// One host after the other attaches. Between them the service may make a step of its own, and a checkpoint.
// What a host does between two steps is its own choice: it applies the gradients, accumulates more, zeroes
// them, leaves. The model has no time: what a deadline does may happen at any moment, or (`patient`) never.
#pragma once

#include <cstdint>
#include <string>

#include "engine/session/explorer.hpp"
#include "service_state.hpp"

namespace accelmgr::client::model {

/// Each value leaves one rule out, which the explorer must find.
enum class Mutation {
  none,
  // The attempt.
  host_finishes_beside_living_runners,
  host_of_a_dead_service_awaits_no_runner,
  host_looks_only_at_runners_it_holds,
  host_waits_for_a_service_that_stands,
  stopped_runner_taken_for_dead,
  slice_of_the_dead_left_without_a_host,
  runners_outlive_the_service,
  // The lease.
  next_host_before_the_attempt_is_closed,
  aborted_attempt_of_the_gone_left_open,
  closed_socket_taken_for_gone,
  detached_with_its_mappings,
  stopped_host_taken_for_gone,
  host_stopped_in_a_write_taken_for_gone,
  lease_kept_by_the_dead,
  // The marks of gradients.
  first_step_adds_to_the_applied,
  aborted_step_counts_as_the_first,
  interrupted_step_does_not_count,
  every_step_overwrites,
  service_adds_to_the_applied,
  overwritten_mark_before_the_step,
  zeroed_mark_before_the_zeroing,
  zeroing_without_a_mark,
  applied_mark_after_the_writing,
  applied_without_a_mark,
  // The marks of parameters.
  half_written_not_noted,
  version_left_odd,
  mark_cleared_by_a_step,
  mark_cleared_by_any_write,
  mark_cleared_by_an_earlier_write,
  mark_cleared_by_an_interrupted_write,
  service_steps_on_half_written,
  service_saves_half_over_good,
};

class ServiceModel {
 public:
  struct Options {
    int ranks = 2;     ///< Up to 2.
    int attempts = 3;  ///< Up to 3.
    int hosts = 2;     ///< That attach, one after the other. Up to 3.
    int deaths = 1;    ///< Up to 3.
    int stops = 1;     ///< Up to 3.
    bool service_steps = true;
    bool patient = false;  ///< Nothing happens because of a deadline.
    Mutation mutation = Mutation::none;
  };
  using State = model::State;
  using Steps = session::Steps<State>;

  explicit ServiceModel(const Options& options) : options_(options) {}

  State initial() const;
  void steps(const State& state, Steps& out) const;
  const char* wrong(const State& state) const;
  bool may_rest(const State& state) const;
  std::string text(const State& state) const;

 private:
  session::RankMask all() const noexcept { return session::all_ranks(options_.ranks); }
  bool is(Mutation mutation) const noexcept { return options_.mutation == mutation; }
  bool runs(const State& s, const Process& host) const noexcept;
  bool attempts_left(const State& s) const noexcept;
  int seen_living(const State& s) const noexcept;
  int living(const State& s) const noexcept;
  bool slices_finished(const State& s) const noexcept;
  bool whole_gradients(const State& s) const noexcept;

  void runner_steps(const State& s, int rank, Steps& out) const;
  void service_steps(const State& s, Steps& out) const;
  void watch_steps(const State& s, Steps& out) const;
  void watch_lease(const State& s, Steps& out) const;
  void settle(State& s) const;
  State& admit(const State& s, Job job, const char* what, Steps& out) const;
  void host_steps(const State& s, int place, Steps& out) const;
  void choose_steps(const State& s, int place, Steps& out) const;
  void attempt_steps(const State& s, int place, Steps& out) const;
  void wait_steps(const State& s, int place, Steps& out) const;
  void end_steps(const State& s, int place, Steps& out) const;
  void write_steps(const State& s, int place, Steps& out) const;
  void zero_steps(const State& s, int place, Steps& out) const;
  void write_half(State& s, const Process& p, bool second) const;
  void fault_steps(const State& s, Steps& out) const;
  void end_service(State& s) const;

  bool abort_word(State& s, std::uint32_t attempt, std::uint32_t author) const;
  bool close_if_over(State& s, std::uint32_t attempt) const;
  /// Makes the next step of a slice, and sends the process to `afterwards` when the slice is finished.
  /// Returns null if `p` stands elsewhere. `p` is a process of `s`.
  const char* slice_step(State& s, Process& p, Pc afterwards) const;

  Options options_;
};

}  // namespace accelmgr::client::model
