#include "engine/client/lost_manager.hpp"

#include <fmt/format.h>

#include <chrono>

#include "accelmgr/errors.hpp"
#include "base/log.hpp"
#include "engine/session/attempt.hpp"

namespace accelmgr::client {

// No other process can finish a committed attempt: all have ended, or they do not move. Ends those that are
// left, then finishes the attempt here. Throws SessionError if a participant cannot be ended: it may go on,
// and would add to what this process has added.
Outcome LostManager::end(std::uint64_t attempt) {
  if (!loss_) {
    const auto time_s =
        double(std::chrono::system_clock::now().time_since_epoch() / std::chrono::milliseconds(1)) / 1e3;
    const int pid = link_.manager_pid();
    link_.take_notices();  // Of processes that were replaced just before the attempt was opened.
    if (!link_.is_of_service()) link_.kill();
    auto& loss = loss_.emplace();
    loss.time_s = time_s;
    loss.pid = pid;
    loss.step = session_.counters(session_.word().index).steps + 1;
    loss.attempt = attempt;
    loss.exit = end_processes_();
    loss.what = "the manager process is gone";
    base::log().info("the manager (pid {}) is lost: {}", pid, loss.exit);
  }
  const session::RankMask participants = session_.control().request.participants;
  session::abort_attempt(view_, attempt, session::author_host);
  if (session_.word().committed(participants)) {
    for (int rank = 0; rank < session_.ranks(); ++rank)
      if ((participants >> rank & 1) != 0 && !link_.runner_ended(rank))
        throw SessionError(
            fmt::format("the manager process is gone: {}; but runner {} (pid {}) cannot be ended by this "
                        "process, and may not have reduced its slice of step {}. Gradients are not complete",
                        loss_->exit, rank, session_.record(rank).pid.load(),
                        session_.counters(session_.word().index).steps + 1));
    // A replacement that was ready just before the attempt was opened takes part, and this process may not
    // have heard of it. The fork server ends after its last runner.
    if (!link_.fork_server_ended())
      throw SessionError(
          fmt::format("the manager process is gone: {}; but its fork server cannot be ended by this process, "
                      "and a runner may not have reduced its slice of step {}. Gradients are not complete",
                      loss_->exit, session_.counters(session_.word().index).steps + 1));
    const auto for_each = [&](auto&& finish) {
      for (int rank = 0; rank < session_.ranks(); ++rank)
        if ((participants >> rank & 1) != 0) finish.finish_slice(rank, attempt);
    };
    for_each(reduction_);
    if (session::updates_parameters(session_)) for_each(update_);
  }
  session::close_if_over(view_, attempt);
  return {StepStatus::manager_lost, "the manager process is gone: " + loss_->exit, -1};
}

bool LostManager::end_if_lost() {
  if (!loss_ && link_.manager_ended()) end(session_.word().attempt);
  return loss_.has_value();
}

}  // namespace accelmgr::client
