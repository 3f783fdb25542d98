// The supervisor's part that deals with losses: who finishes what they left, and who takes their place.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>
#include <time.h>

#include <algorithm>

#include "accelmgr/errors.hpp"
#include "base/log.hpp"
#include "base/log_tail.hpp"
#include "ipc/process.hpp"
#include "ipc/socket.hpp"
#include "manager/supervisor.hpp"
#include "session/attempt.hpp"

namespace accelmgr::manager {
namespace {

using session::Life;
using session::Reason;

std::int64_t wall_clock_ns() {
  timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

template <std::size_t N>
void copy_text(char (&to)[N], const std::string& from) {
  to[from.copy(to, N - 1)] = 0;
}

/// What the runner itself said about its end.
std::string last_words(const session::RankRecord& record) {
  const auto reason = record.reason.load();
  return reason == Reason::exception || reason == Reason::model_error ? record.error : "";
}

std::string last_log_lines(const session::LogTail& tail) {
  constexpr std::size_t most = 10;
  const auto lines = base::log_lines(tail.text, tail.written.load(), most);
  return fmt::format("{}", fmt::join(lines, "\n"));
}

}  // namespace

void Supervisor::runner_ended(int rank) {
  const auto patience = base::Deadline::in_seconds(launcher_report_s);
  // Until it counts as lost, and perhaps as started anew by then.
  const auto* watch = runner(rank).end.get();
  const auto known = [&] { return runner(rank).end.get() != watch || has_no_process(rank); };
  while (!known() && take_launcher_event(patience)) {
  }
  if (known()) return;
  // No report: the launcher is dead, and its runners were killed with it; or it is stopped.
  if (ipc::wait_ended(launcher_->pidfd(), patience)) launcher_ended();
  if (!known()) lost(rank, ipc::unknown_exit);
}

// Called once the process is known to have ended: only now are its slab and slice used by others.
void Supervisor::lost(int rank, int wait_status) {
  auto& record = session_.record(rank);
  if (has_no_process(rank)) return;
  record.exit_status.store(wait_status);
  // What user code has forked there. Otherwise the launcher has ended it.
  if (launcher_lost_ && runner(rank).pidfd)
    ipc::send_group_signal(runner(rank).pidfd.get(), record.pid.load(), SIGKILL);
  const bool retired = runner(rank).retiring;
  if (retired) base::log().info("runner {}, which was let go: {}", rank, ipc::describe_exit(wait_status));
  record.life.store(retired ? Life::absent : Life::lost);
  finish_for(rank);
  session_.wake_everyone();
  if (starting_ == rank) starting_.reset();
  if (retired && (session_.control().team.load() >> rank & 1) != 0) want(rank, 0);  // It grew back meanwhile.
  if (session_.control().stopping.load() != 0 || (retired && !launcher_lost_)) return start_next();

  const auto verdict = runner(rank).verdict;
  const auto reason = record.reason.load();
  const auto what = verdict.empty() ? last_words(record) : verdict;
  if (!answered_) {
    const auto* phase = to_string(record.phase.load());
    throw RunnerError(fmt::format("runner {} {} in phase {}{}{}", rank, ipc::describe_exit(wait_status),
                                  phase, what.empty() ? "" : ": ", what),
                      rank, phase);
  }
  if (launcher_lost_) return relaunch_when_all_are_gone();  // The launcher's incident stands for theirs.
  const auto incident = record_incident(rank, record.pid.load(), wait_status, what);
  repair(rank, reason, incident);
  session_.wake_everyone();
}

void Supervisor::finish_for(int rank) {
  const auto participants = session_.control().request.participants;
  const auto word = session_.word();
  if (word.closed || (participants >> rank & 1) == 0) return;
  if (session::abort_attempt(session_, word.attempt, session::author_supervisor)) return;
  const auto now = session_.word();
  if (now.attempt != word.attempt || !now.committed(participants)) return;
  reduction_.finish_slice(rank, word.attempt);
  session::close_if_over(session_, word.attempt);
}

// What is repaired nobody else tells; the rest is reported by the step that meets it.
void Supervisor::repair(int rank, Reason reason, const std::string& incident) {
  auto& control = session_.control();
  if (control.given_up.load() != 0) return base::log().info("{}", incident);
  const auto team = control.team.load();
  const auto rest = team & ~(session::RankMask{1} << rank);
  const auto decision =
      policy_.runner_lost(base::now_ns(), __builtin_popcount(rest), reason != Reason::model_error);
  base::log().log(decision.kind == Decision::Kind::give_up ? spdlog::level::info : spdlog::level::warn, "{}",
                  incident);
  switch (decision.kind) {
    case Decision::Kind::replace:
      control.replacements.fetch_add(1);
      base::log().info("runner {} is replaced in {} ms (the {}. replacement)", rank,
                       decision.delay_ns / 1'000'000, control.replacements.load());
      want(rank, decision.delay_ns);
      break;
    case Decision::Kind::leave_out:
      control.team.store(rest);
      base::log().warn("runner {} is left out from now on; {} go on", rank, __builtin_popcount(rest));
      break;
    case Decision::Kind::give_up:
      give_up(decision.why);
      break;
  }
  start_next();
}

void Supervisor::launcher_ended() {
  if (launcher_lost_) return;
  launcher_lost_ = true;
  take_launcher_events();  // Runners that ended before it did.
  const int pid = launcher_->pid();
  const int status = launcher_->take_exit_status().value_or(SIGKILL);
  if (!answered_)
    throw RunnerError(fmt::format("the launcher {} while it started the runners", ipc::describe_exit(status)),
                      -1, "init");
  const auto incident = record_incident(-1, pid, status, "the launcher ended, and all runners with it");
  base::log().log(config_.runners.on_loss == LossPolicy::fail ? spdlog::level::info : spdlog::level::warn,
                  "{}", incident);
  starting_.reset();
  relaunch_when_all_are_gone();
}

void Supervisor::relaunch_when_all_are_gone() {
  auto& control = session_.control();
  for (auto& other : runners_)
    if (other.pidfd && !ipc::has_ended(other.pidfd.get())) return;
  for (int rank = 0; rank < session_.ranks(); ++rank) {
    if (!has_no_process(rank)) lost(rank, SIGKILL);
    if (!launcher_lost_) return;  // That was the last, and has done the rest.
  }
  if (control.given_up.load() != 0) return;
  const auto decision = policy_.launcher_lost(base::now_ns());
  if (decision.kind == Decision::Kind::give_up) return give_up(decision.why);
  launcher_end_.reset();
  launcher_watch_.reset();
  try {
    launcher_.emplace(relaunch_());
    watch_launcher();
    base::log().info("a new launcher (pid {}) starts all runners anew", launcher_->pid());
    notices_.emplace_back(std::in_place_type<protocol::Relaunched>, base::duplicate(launcher_->pidfd()));
  } catch (const SystemError& error) {
    return give_up(fmt::format("the launcher cannot be started again: {}", error.what()));
  }
  launcher_lost_ = false;
  send_notices();
  wanted_.clear();
  const auto team = control.team.load();
  for (int rank = 0; rank < session_.ranks(); ++rank)
    if ((team >> rank & 1) != 0) {
      control.replacements.fetch_add(1);
      want(rank, decision.delay_ns);
    }
  start_next();
}

std::string Supervisor::record_incident(int rank, int pid, int wait_status, const std::string& what) {
  auto& control = session_.control();
  const auto number = control.incidents.load() + 1;
  auto& incident = session_.incident(number);
  incident.time_ns = wall_clock_ns();
  incident.rank = rank;
  incident.pid = pid;
  incident.exit_status = wait_status;
  incident.step = step_under_way();
  incident.log[0] = 0;
  copy_text(incident.what, what);
  if (rank >= 0) {
    const auto& record = session_.record(rank);
    incident.generation = record.generation.load();
    incident.phase = record.phase.load();
    incident.reason = record.reason.load();
    incident.attempt = record.attempt.load();
    copy_text(incident.log, last_log_lines(record.log));
  } else {
    incident.generation = 0;
    incident.phase = session::Phase::none;
    incident.reason = Reason::none;
    incident.attempt = session_.word().attempt;
  }
  control.incidents.store(number);
  base::set_log_step(incident.step);
  const bool again = !what.empty() && what == last_exception_;
  last_exception_ = what;
  return fmt::format("{} (pid {}) {}{}{}{}", rank < 0 ? "the launcher" : fmt::format("runner {}", rank), pid,
                     ipc::describe_exit(wait_status),
                     rank < 0 ? "" : fmt::format(" in phase {}", to_string(incident.phase)),
                     what.empty() ? "" : ": ", again ? "the same again" : what);
}

void Supervisor::give_up(const std::string& why) {
  auto& control = session_.control();
  if (control.given_up.load() != 0) return;
  copy_text(control.given_up_why, why);
  base::log().info("nothing more is done about lost runners: {}", why);
  control.given_up.store(1);
  wanted_.clear();
  session_.wake_everyone();
}

// Abort first, then a note of where it stood, then the signal: whoever sees its end finds both.
void Supervisor::end_runner(int rank, const std::string& why) {
  if (!runner(rank).verdict.empty()) return;
  const auto word = session_.word();
  if (starting_ != rank) session::abort_attempt(session_, word.attempt, session::author_supervisor);
  base::set_log_step(step_under_way());
  base::log().info("{}; it is ended", why);
  runner(rank).verdict = why;
  runner(rank).killed_ns = base::now_ns();
  ipc::send_signal(runner(rank).pidfd.get(), SIGKILL);
}

}  // namespace accelmgr::manager
