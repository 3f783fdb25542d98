#include "engine/client/attempt_wait.hpp"

#include <fmt/format.h>

#include "base/ipc/cores.hpp"
#include "base/ipc/epoch.hpp"
#include "base/timing.hpp"
#include "engine/session/attempt.hpp"
#include "engine/session/stored_text.hpp"

namespace accelmgr::client {

bool AttemptWait::participant_ended(session::RankMask participants) const noexcept {
  for (int rank = 0; rank < session_.ranks(); ++rank)
    if ((participants >> rank & 1) != 0 && link_.runner_ended(rank)) return true;
  return false;
}

Outcome AttemptWait::until_over(std::uint64_t attempt, session::RankMask participants,
                                const base::Patience& patience) {
  // The host spins only on a core that the runners do not need: they compute meanwhile.
  static const int cores = ipc::allowed_cores();
  const int spin_us = cores > __builtin_popcount(participants) ? config_.runners.spin_us : 0;
  Wait wait{.participants = participants, .patience = patience};
  for (;;) {
    const auto& finish = session_.control().finish;
    const auto seen = ipc::load(finish);
    const auto word = session_.word();
    switch (next_action(word, participants, observe(word, wait))) {
      case Action::report_abort:
        session::close_if_over(view_, attempt);
        return why_aborted(word.mask);
      case Action::return_result:
        return {};
      case Action::close:
        session::close_if_over(view_, attempt);
        break;
      case Action::end_without_manager:
        return lost_manager_.end(attempt);
      case Action::abort_for_supervisor:
        session::abort_attempt(view_, attempt, session::author_supervisor);
        break;
      case Action::abort_for_host: {
        // The text is made before the abort: runners leave their phases as soon as they see it.
        auto text = fmt::format("no result {}: {}", patience.bound(),
                                phases_of(session_, config_, participants, &wait.standings));
        if (!session::abort_attempt(view_, attempt, session::author_host)) break;
        session::close_if_over(view_, attempt);
        return {StepStatus::timeout, std::move(text), -1};
      }
      case Action::leave:
        throw ServiceStalled(fmt::format(
            "the service (pid {}) has stood still since step {} was committed, and may be paused: "
            "{}. This host has left the session, and its gradients are not complete; attach again "
            "when the service runs",
            link_.manager_pid(), session_.counters(session_.word().index).steps + 1,
            phases_of(session_, config_, participants, &wait.standings)));
      case Action::wait:
        ipc::wait_changed(finish, seen,
                          word.committed(participants) ? timing::look_ns : patience.next_look_ns(), spin_us);
        wait.parked = true;
    }
  }
}

// Only what the state of the word calls for: most looks are system calls, and a short step must not make
// them.
Observed AttemptWait::observe(const session::StepWord& word, Wait& wait) {
  Observed observed;
  const auto participants = wait.participants;
  if (word.abort || word.closed) return observed;
  if (word.committed(participants)) {
    observed.is_done = session::is_done(session_, word.attempt);
    if (observed.is_done) return observed;
    if (wait.parked) wait.standings.look(session_);  // As below.
    std::uint64_t progress = 0;
    for (int rank = 0; rank < session_.ranks(); ++rank) progress += session_.reduction_progress(rank);
    const double stood_s = timing::seconds(wait.stall_timer.look(progress, base::now_ns()));
    observed.slices_stalled =
        stood_s > config_.runners.reduction_timeout + timing::reduction_by_host_margin_s;
    observed.of_service = link_.is_of_service();
    observed.patience_over = observed.slices_stalled && observed.of_service && wait.patience.over();
    observed.manager_ended = link_.manager_ended();
    return observed;
  }
  observed.participant_ended = participant_ended(participants);
  observed.manager_ended = link_.manager_ended();
  if (observed.participant_ended || observed.manager_ended) return observed;
  if (wait.parked)
    wait.standings.look(session_);  // Not before the first wait: that would delay a short step.
  observed.patience_over = wait.patience.over();
  return observed;
}

// When this returns, the host may change the gradients. So it waits for the replicas, beyond the patience of
// the step. The supervisor ends a runner that takes longer than step_timeout; the host goes on without an
// answer only if the supervisor is stuck, too. If a runner dies meanwhile, the next step notices.
double AttemptWait::until_applied(std::uint64_t attempt, session::RankMask participants,
                                  const base::Patience& patience) {
  const auto& readiness = session_.control().readiness;
  const auto deadline = base::Deadline::in_seconds(config_.step_timeout + timing::reduction_by_host_margin_s);
  for (;;) {
    const auto seen = ipc::load(readiness);
    bool applied = true;
    double norm = 0;
    for (int rank = 0; rank < session_.ranks(); ++rank) {
      if ((participants >> rank & 1) == 0) continue;
      const auto& record = session_.record(rank);
      if (record.acknowledged_attempt.load() >= attempt)
        norm = record.grad_norm.load();  // Every rank has the norm of the whole gradient.
      else
        applied = false;
    }
    if (applied || participant_ended(participants) || link_.manager_ended() || patience.was_interrupted() ||
        deadline.passed())
      return norm;
    ipc::wait_changed(readiness, seen, timing::look_ns, 0);
  }
}

Outcome AttemptWait::why_aborted(std::uint32_t author) const {
  if (author == session::author_supervisor) return {StepStatus::runner_lost};
  const int rank = static_cast<int>(author);
  const auto& record = session_.record(rank);
  switch (record.reason.load()) {
    case session::Reason::data_end:
      return {StepStatus::data_end, session::text_of(record.error), rank};
    case session::Reason::data_error:
      return {
          StepStatus::data_end,
          fmt::format("the data source '{}' failed: {}", config_.data.kind, session::text_of(record.error)),
          rank, "DataError"};
    case session::Reason::nonfinite:
    case session::Reason::overflow:
      return {.status = StepStatus::nonfinite,
              .error = fmt::format("rank {}: {}", rank, session::text_of(record.error)),
              .rank = rank,
              .overflow = record.reason.load() == session::Reason::overflow};
    case session::Reason::team:
    case session::Reason::lost_with_another:
      return {.status = StepStatus::runner_lost,
              .error = session::text_of(record.error),
              .rank = rank,
              .device_team_failed = true};
    case session::Reason::parameters_changed:
      throw UsageError(
          fmt::format("rank {}: {}; write parameters between steps", rank, session::text_of(record.error)));
    default:
      return {StepStatus::runner_lost};
  }
}

}  // namespace accelmgr::client
