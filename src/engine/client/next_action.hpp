// What the host does next about the attempt that it waits for: a pure function of what it sees.
//
// clang-format off
//   | the attempt is       | and                                                    | the host                      |
//   |----------------------|--------------------------------------------------------|-------------------------------|
//   | aborted              |                                                        | reports why                   |
//   | closed               |                                                        | returns the result            |
//   | committed            | it is done                                             | closes it                     |
//   |                      | the manager has ended                                  | finishes it without a manager |
//   |                      | no slice moves for too long; the manager is its own    | kills it, and does the same   |
//   |                      | the same; it is a service, and its patience is over    | leaves the session            |
//   | computing            | the manager has ended                                  | aborts it without a manager   |
//   |                      | a participant has ended                                | aborts it for the supervisor  |
//   |                      | the host's patience is over                            | aborts it for itself          |
//   | committed, computing | none of these                                          | waits                         |
// clang-format on
//
// Each action is safe to repeat, and to take too late: the transitions in engine/session/step_word.hpp
// decide.
#pragma once

#include "engine/session/step_word.hpp"

namespace accelmgr::client {

/// What the host sees of an attempt beside the step word. Only the facts that the word's state calls for need
/// to be there; the others keep their defaults.
struct Observed {
  bool is_done = false;         ///< Reduced, and updated.
  bool slices_stalled = false;  ///< No slice has moved for so long that the supervisor must be stuck.
  bool of_service = false;      ///< The manager is a service. It may merely be paused, so no host ends it.
  bool participant_ended = false;
  /// Observed after `participant_ended`: runners end when their manager ends, and then its loss is reported.
  bool manager_ended = false;
  bool patience_over = false;
};

enum class Action {
  report_abort,
  return_result,
  close,
  end_without_manager,
  abort_for_supervisor,
  abort_for_host,
  leave,
  wait,
};

constexpr Action next_action(const session::StepWord& word, session::RankMask participants,
                             const Observed& observed) noexcept {
  if (word.abort) return Action::report_abort;
  if (word.closed) return Action::return_result;
  if (word.committed(participants)) {
    // The runner that finished its slice last should close the attempt, but it may have been stopped before.
    if (observed.is_done) return Action::close;
    if (observed.manager_ended) return Action::end_without_manager;
    if (!observed.slices_stalled) return Action::wait;
    if (!observed.of_service) return Action::end_without_manager;
    return observed.patience_over ? Action::leave : Action::wait;
  }
  if (observed.manager_ended) return Action::end_without_manager;
  if (observed.participant_ended) return Action::abort_for_supervisor;
  return observed.patience_over ? Action::abort_for_host : Action::wait;
}

}  // namespace accelmgr::client
