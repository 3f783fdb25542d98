#include "launcher/launch/run/processes.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <tuple>
#include <utility>

#include "base/ipc/process.hpp"
#include "base/real_time.hpp"
#include "base/timing.hpp"
#include "launcher/launch/run/failure.hpp"
#include "launcher/launch/run/limits.hpp"

namespace accelmgr::launch {

SpawnContext::Processes::Processes(Spawner spawner, Settings settings)
    : spawner_(std::move(spawner)), settings_(settings), owner_(getpid()) {}

SpawnContext::Processes::Processes(int rank, Value result)
    : results_{std::move(result)}, over_(true), owner_(getpid()) {
  ranks_.push_back({.rank = rank, .pid = owner_, .pidfd = {}, .exit_code = 0, .failure = {}, .report = {}});
}

bool SpawnContext::Processes::is_ours() const noexcept { return getpid() == owner_; }

void SpawnContext::Processes::start(const Task& task, std::span<const std::pair<int, int>> fds) {
  const auto slot = static_cast<int>(ranks_.size());
  auto report = spawner_->start(slot, task, fds);
  ranks_.push_back({.rank = task.rank,
                    .pid = 0,
                    .pidfd = {},
                    .exit_code = {},
                    .failure = {},
                    .report = std::move(report)});
  results_.emplace_back();
}

void SpawnContext::Processes::wait_started(base::Deadline deadline) {
  const auto is_asked = [](const Rank& rank) { return rank.pid == 0; };
  while (std::any_of(ranks_.begin(), ranks_.end(), is_asked)) {
    if (take_event(deadline)) continue;
    if (spawner_->fork_server_end())
      throw SessionError(
          fmt::format("the fork server, which is the parent of the ranks, ended while it started them: {}",
                      *spawner_->fork_server_end()));
    std::vector<int> missing;
    for (const auto& rank : ranks_)
      if (is_asked(rank)) missing.push_back(rank.rank);
    throw SessionError(
        fmt::format("the fork server did not start ranks {} in time", fmt::join(missing, ", ")));
  }
}

bool SpawnContext::Processes::take_event(base::Deadline deadline) {
  auto event = spawner_->next(deadline);
  if (!event) return false;
  std::visit([this](const auto& what) { take(what); }, *event);
  return true;
}

void SpawnContext::Processes::take(const ipc::Started& started) {
  auto& rank = ranks_.at(static_cast<std::size_t>(started.rank));
  rank.pid = started.pid;
  rank.pidfd = base::duplicate(started.pidfd.get());
}

/// A report that cannot be read is a failure too.
Report SpawnContext::Processes::report_of(Rank& rank) {
  const auto socket = std::move(rank.report);
  try {
    return read_report(socket.get()).value_or(Report{});
  } catch (const std::exception&) {
    return {.result = {}, .failure = failure_of(std::current_exception(), rank.rank, "report")};
  }
}

void SpawnContext::Processes::take(const ipc::Ended& ended) {
  const auto slot = static_cast<std::size_t>(ended.rank);
  auto& rank = ranks_.at(slot);
  if (ended.with_server) return lose(rank);
  if (ended.pid == 0) throw not_forked(rank.rank, ended.error);
  const bool by_signal = WIFSIGNALED(ended.wait_status);
  rank.exit_code = by_signal ? -WTERMSIG(ended.wait_status) : WEXITSTATUS(ended.wait_status);
  auto report = report_of(rank);
  rank.failure = report.failure;
  if (report.result) results_[slot] = std::move(*report.result);
  if (ended.wait_status == 0 && !report.failure) return;
  Noticed noticed{.failure = report.failure.value_or(Failure{}),
                  .seen_ns = ended.time_ns,
                  .reported = report.failure.has_value()};
  noticed.failure.rank = rank.rank;
  if (!noticed.reported) {
    noticed.failure.time_s = static_cast<double>(ended.time_ns) / 1e9;
    ipc::set_exit(noticed.failure, ended.wait_status);
  }
  failures_.push_back(std::move(noticed));
}

bool SpawnContext::Processes::all_ended() const noexcept {
  return std::all_of(ranks_.begin(), ranks_.end(),
                     [](const Rank& rank) { return rank.exit_code.has_value(); });
}

bool SpawnContext::Processes::join(base::Deadline deadline) {
  if (error_) throw SpawnError(*error_);
  if (over_) return true;
  if (!is_ours())
    throw UsageError(
        "a SpawnContext must be joined by the process that called spawn(), not by one forked from it");
  while (!all_ended()) {
    if (!failures_.empty()) fail();
    if (!take_event(deadline)) return false;
  }
  if (!failures_.empty()) fail();
  stop();
  return true;
}

bool SpawnContext::Processes::wait(int local_rank, base::Deadline deadline) {
  if (local_rank < 0 || static_cast<std::size_t>(local_rank) >= ranks_.size())
    throw UsageError(fmt::format("there is no process {} in a launch of {}", local_rank, ranks_.size()));
  const auto& rank = ranks_[static_cast<std::size_t>(local_rank)];
  if (!rank.exit_code && !is_ours())
    throw UsageError(
        "a process must be waited for by the one that called spawn(), not by one forked from it");
  while (!rank.exit_code)
    if (!take_event(deadline)) return false;
  return true;
}

std::vector<ProcessState> SpawnContext::Processes::states() {
  while (!over_ && is_ours() && take_event(base::Deadline::at_ns(0))) {
  }
  std::vector<ProcessState> states;
  for (std::size_t slot = 0; slot < ranks_.size(); ++slot) {
    const auto& rank = ranks_[slot];
    // Its pidfd tells the end before the fork server does.
    if (!rank.exit_code && ipc::has_ended(rank.pidfd.get()))
      wait(static_cast<int>(slot), base::Deadline::in_seconds(timing::end_report_s));
    states.push_back({rank.pid, rank.pidfd.get(), rank.exit_code, rank.failure});
  }
  return states;
}

void SpawnContext::Processes::stop() noexcept {
  spawner_->stop(base::Deadline::in_seconds(timing::spawn_stop_s));
  for (auto& rank : ranks_)
    if (!rank.exit_code) rank.exit_code = -SIGKILL;  // By stop().
  held_.clear();
  over_ = true;
}

/// The fork server counts as failed, not the processes that end with it.
void SpawnContext::Processes::lose(Rank& rank) {
  rank.exit_code = -SIGKILL;
  if (std::exchange(lost_fork_server_, true)) return;
  Failure failure;
  failure.phase = "fork server";
  failure.what =
      fmt::format("the fork server, which is the parent of the ranks, ended: {}; they ended with it",
                  spawner_->fork_server_end().value_or(""));
  failure.time_s = static_cast<double>(base::real_time_ns()) / 1e9;
  failures_.push_back({.failure = std::move(failure), .seen_ns = base::real_time_ns(), .reported = false});
}

void SpawnContext::Processes::end_others() noexcept {
  try {
    const auto until = base::Deadline::in_seconds(settings_.terminate_timeout_s);
    if (!all_ended()) spawner_->signal(SIGTERM);
    while (!all_ended() && take_event(until)) {
    }
  } catch (const std::exception&) {
    // Asking them to end has failed. stop() kills them.
  }
  stop();
}

/// The first failure is the one whose process ended first. If the fork server saw several ends at the same
/// time, processes that reported nothing (killed by a signal, mostly) come first: the others usually failed
/// because of them.
void SpawnContext::Processes::fail() {
  while (take_event(base::Deadline::at_ns(0))) {
  }
  const auto asked_to_end_ns = base::real_time_ns();
  end_others();
  // Processes that ended later were ended by SIGTERM. A failure reported before that has an earlier time_s.
  std::erase_if(failures_, [&](const Noticed& noticed) {
    return noticed.failure.time_s * 1e9 > static_cast<double>(asked_to_end_ns);
  });
  const auto place = [](const Noticed& noticed) {
    return std::tuple(noticed.seen_ns, noticed.reported, noticed.failure.time_s);
  };
  std::sort(failures_.begin(), failures_.end(),
            [&](const Noticed& a, const Noticed& b) { return place(a) < place(b); });
  Failure first = failures_.front().failure;
  std::vector<Failure> later;
  for (std::size_t i = 1; i < failures_.size(); ++i) later.push_back(failures_[i].failure);
  failures_.clear();
  error_.emplace(std::move(first), std::move(later));
  throw SpawnError(*error_);
}

void SpawnContext::Processes::terminate() noexcept {
  if (over_ || !is_ours()) return;
  end_others();
  failures_.clear();
}

std::vector<pid_t> SpawnContext::Processes::pids() const {
  std::vector<pid_t> pids;
  for (const auto& rank : ranks_) pids.push_back(rank.pid);
  return pids;
}

}  // namespace accelmgr::launch
