// How the supervisor handles losses: it finishes the attempt for a lost runner, records the incident, and
// decides whether another runner replaces it: want() queues the start, which is in supervisor.cpp.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>
#include <sys/wait.h>

#include <utility>

#include "accelmgr/errors.hpp"
#include "base/fences.hpp"
#include "base/ipc/memory.hpp"
#include "base/ipc/process.hpp"
#include "base/ipc/socket.hpp"
#include "base/log.hpp"
#include "base/log_tail.hpp"
#include "base/real_time.hpp"
#include "base/timing.hpp"
#include "engine/manager/supervisor.hpp"
#include "engine/session/attempt.hpp"
#include "engine/session/stored_text.hpp"

namespace accelmgr::manager {
namespace {

using session::Reason;
using session::RunnerState;

template <std::size_t N>
void copy_text(char (&to)[N], const std::string& from) {
  to[from.copy(to, N - 1)] = 0;
}

/// The exception that the runner recorded before it ended; empty if there is none.
std::string last_words(const session::RankRecord& record) {
  return session::ends_runner(record.reason.load()) ? session::text_of(record.error) : "";
}

/// CUDA, torch and torch_xla say so in these words, in C++ and in Python.
bool tells_of_too_little_memory(const session::Incident& incident) {
  return session::text_of(incident.what).find("out of memory") != std::string::npos;
}

std::string last_log_lines(const session::LogTail& tail) {
  constexpr std::size_t most = 10;
  const auto lines = base::log_lines(tail.text, tail.written.load(), most);
  return fmt::format("{}", fmt::join(lines, "\n"));
}

}  // namespace

// Called when the process is known to have ended (fencing): only then may others use its slab and slice.
void Supervisor::lost(int rank, int wait_status) {
  const auto& record = session_.record(rank);
  if (has_no_process(rank)) return;
  const auto phase = phase_of_start(rank);
  const bool was_ready = record.state.load() == RunnerState::ready;  // Its record has what it said itself.
  note_end(rank, wait_status);
  const bool retired = runner(rank).retiring;
  if (session_.control().stopping.load() != 0 || retired) return start_next();

  const auto verdict = runner(rank).verdict;
  const auto reason = record.reason.load();
  auto what = verdict.empty() ? last_words(record) : verdict;
  if (what.empty()) what = why_killed(wait_status);
  if (!has_started_)
    throw RunnerError(fmt::format("runner {} {} in phase {}{}{}", rank, ipc::describe_exit(wait_status),
                                  phase, what.empty() ? "" : ": ", what),
                      rank, to_string(record.phase.load()));
  const auto incident = record_incident(rank, phase, record.pid.load(), wait_status, what);
  const bool with_another = was_ready && verdict.empty() && reason == Reason::lost_with_another;
  if (session_.control().given_up.load() != 0)
    base::log().info("{}", incident);
  else
    repair(rank, decide(rank, reason, with_another), incident);
  view_.wake_everyone();
}

/// Says that the kernel has killed a runner for want of memory, if it has killed one since; else empty.
std::string Supervisor::why_killed(int wait_status) {
  if (wait_status == ipc::unknown_exit || !WIFSIGNALED(wait_status) || WTERMSIG(wait_status) != SIGKILL)
    return {};
  const auto now = ipc::oom_kills();
  if (std::exchange(oom_kills_seen_, now.count) == now.count) return {};
  return fmt::format("the kernel has killed it for want of memory ({} counts {} such kills)", now.counted_by,
                     now.count);
}

void Supervisor::note_end(int rank, int wait_status) {
  auto& record = view_.record(rank);
  record.exit_status.store(wait_status);
  const bool retired = runner(rank).retiring;
  if (auto& lost_ns = lost_ns_[static_cast<std::size_t>(rank)]; !retired && lost_ns == 0) lost_ns = clock_();
  if (retired)
    base::log().info("runner {}, which was asked to end, has ended: {}", rank,
                     ipc::describe_exit(wait_status));
  record.state.store(retired ? RunnerState::absent : RunnerState::lost);
  finish_for(rank);
  view_.wake_everyone();
  runner(rank).part = StartPart::none;
  std::erase_if(wanted_, [rank](const Wanted& w) { return w.rank == rank; });
  if (retired && (session_.control().team.load() >> rank & 1) != 0) want(rank, 0);
}

void Supervisor::finish_for(int rank) {
  const session::RankMask participants = session_.control().request.participants;
  const auto word = session_.word();
  if (word.closed || (participants >> rank & 1) == 0) return;
  if (session::abort_attempt(view_, word.attempt, session::author_supervisor)) return;
  const auto now = session_.word();
  if (now.attempt != word.attempt || !now.committed(participants)) return;
  reduction_.finish_slice(rank, word.attempt);
  finish_updates();
}

// The slices of ranks without a process. Those that live may still reduce, and then this is called again.
void Supervisor::finish_updates() {
  const session::RankMask participants = session_.control().request.participants;
  const auto word = session_.word();
  if (word.closed || word.abort || !word.committed(participants)) return;
  if (!session::slices_finished(session_, word.attempt)) return;
  session::RankMask lost = 0;
  for (int rank = 0; rank < session_.ranks(); ++rank)
    if ((participants >> rank & 1) != 0 && participant_is_gone(rank)) lost |= session::RankMask{1} << rank;
  if (lost != 0 && session::updates_parameters(session_)) {
    // An attempt without updates may be closed already. Then the request read above is the next attempt's.
    base::acquire_fence();
    if (const auto now = session_.word(); now.closed || now.attempt != word.attempt) return;
    for (int rank = 0; rank < session_.ranks(); ++rank)
      if ((lost >> rank & 1) != 0) update_.finish_slice(rank, word.attempt);
  }
  session::close_if_over(view_, word.attempt);
}

/// Why a replacement of the runner that the last incident is about would be lost in the same way.
std::string Supervisor::why_it_recurs(int rank, Reason reason) const {
  if (reason == Reason::model_error) return "a replacement would fail in the same way";
  const auto last = session_.control().incidents.load();
  const auto first = last > session::max_incidents ? last - session::max_incidents + 1 : 1;
  if (!tells_of_too_little_memory(session_.incident(last))) return {};
  for (auto number = last; number-- > first;) {
    const auto& before = session_.incident(number);
    if (before.rank != rank) continue;
    if (before.step != session_.incident(last).step || !tells_of_too_little_memory(before)) return {};
    return fmt::format(
        "runner {} and its replacement have both run out of memory in this step; a smaller "
        "batch_size_per_device, fewer runners on its device or a smaller model need less",
        rank);
  }
  return {};
}

/// `with_another`: only because another runner was lost before it.
Decision Supervisor::decide(int rank, Reason reason, bool with_another) {
  if (with_another) return policy_.lost_with_another();
  const auto rest = session_.control().team.load() & ~(session::RankMask{1} << rank);
  return policy_.runner_lost(clock_(), __builtin_popcount(rest), why_it_recurs(rank, reason));
}

// A loss that is repaired is logged here as a warning. A loss that is not repaired is reported by the step
// that fails with it, so here it is logged as info only.
void Supervisor::repair(int rank, const Decision& decision, const std::string& incident) {
  auto& control = view_.control();
  const auto rest = control.team.load() & ~(session::RankMask{1} << rank);
  base::log().log(decision.kind == Decision::Kind::give_up ? base::LogLevel::info : base::LogLevel::warning,
                  "{}", incident);
  switch (decision.kind) {
    case Decision::Kind::replace:
      control.replacements.fetch_add(1);
      base::log().info("runner {} will be replaced in {} ms (replacement {})", rank,
                       decision.delay_ns / 1'000'000, control.replacements.load());
      want(rank, decision.delay_ns);
      break;
    case Decision::Kind::leave_out:
      control.team.store(rest);
      lost_ns_[static_cast<std::size_t>(rank)] = 0;
      base::log().warn("runner {} is left out from now on; {} runners go on", rank, __builtin_popcount(rest));
      break;
    case Decision::Kind::give_up:
      give_up(decision.why);
      break;
  }
  start_next();
}

// The end of each of its runners is an event of its own. When all have ended, relaunch() starts a new one.
void Supervisor::note_fork_server_loss() {
  fork_server_lost_ = true;
  const int pid = fork_server_->pid();
  const int status = fork_server_->server_exit().value_or(ipc::unknown_exit);
  if (!has_started_)
    throw RunnerError(
        fmt::format("the fork server ended ({}) while it started the runners", ipc::describe_exit(status)),
        -1, "init");
  const auto incident =
      record_incident(-1, "", pid, status, "the fork server ended, and all runners with it");
  base::log().log(
      config_.runners.on_loss == LossPolicy::fail ? base::LogLevel::info : base::LogLevel::warning, "{}",
      incident);
  for (auto& r : runners_) r.part = StartPart::none;
}

void Supervisor::relaunch() {
  auto& control = view_.control();
  const auto decision = policy_.fork_server_lost(clock_());
  if (decision.kind == Decision::Kind::give_up) return give_up(decision.why);
  processes_watch_.reset();
  try {
    fork_server_.emplace(relaunch_());
    watch_processes();
    base::log().info("a new fork server (pid {}) starts all runners anew", fork_server_->pid());
    for (auto* driver : drivers_) driver->tell(protocol::Relaunched{base::duplicate(fork_server_->pidfd())});
  } catch (const Error& error) {
    return give_up(fmt::format("the fork server cannot be started again: {}", error.what()));
  }
  fork_server_lost_ = false;
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

std::string Supervisor::record_incident(int rank, const std::string& phase, int pid, int wait_status,
                                        const std::string& what) {
  auto& control = view_.control();
  const auto number = control.incidents.load() + 1;
  auto& incident = view_.incident(number);
  incident.time_ns = base::real_time_ns();
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
  return fmt::format("{} (pid {}) {}{}{}{}", rank < 0 ? "the fork server" : fmt::format("runner {}", rank),
                     pid, ipc::describe_exit(wait_status), rank < 0 ? "" : " in phase " + phase,
                     what.empty() ? "" : ": ", again ? "the same again" : what);
}

void Supervisor::give_up(const std::string& why) {
  auto& control = view_.control();
  if (control.given_up.load() != 0) return;
  copy_text(control.given_up_why, why);
  base::log().info("lost runners are no longer recovered: {}", why);
  control.given_up.store(1);
  wanted_.clear();
  view_.wake_everyone();
  gave_up_();
}

// Aborts, then notes the reason, then kills: a process that sees the end of the runner finds both.
void Supervisor::end_runner(int rank, const std::string& why) {
  if (!runner(rank).verdict.empty() || ipc::has_ended(runner(rank).pidfd.get())) return;
  const auto word = session_.word();
  if (runner(rank).part == StartPart::none)
    session::abort_attempt(view_, word.attempt, session::author_supervisor);
  base::set_log_step(step_under_way());
  base::log().info("{}; it is killed", why);
  runner(rank).verdict = why;
  runner(rank).killed_ns = clock_();
  ipc::send_signal(runner(rank).pidfd.get(), SIGKILL);
}

}  // namespace accelmgr::manager
