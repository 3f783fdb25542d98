#include "launch/processes.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <tuple>

#include "ipc/process.hpp"
#include "launch/failure.hpp"
#include "launch/limits.hpp"

namespace accelmgr::launch {
namespace {

/// Of the launcher: it kills, and waits for what it has killed.
constexpr double stop_timeout_s = 5;

std::int64_t real_time_ns() noexcept {
  timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

}  // namespace

SpawnContext::Processes::Processes(Spawner spawner, Settings settings)
    : spawner_(std::move(spawner)), settings_(settings), owner_(getpid()) {}

SpawnContext::Processes::Processes(int rank, Value result)
    : results_{std::move(result)}, over_(true), owner_(getpid()) {
  ranks_.push_back({.rank = rank, .life = Life::ended, .pid = owner_, .report = {}});
}

bool SpawnContext::Processes::is_ours() const noexcept { return getpid() == owner_; }

void SpawnContext::Processes::start(const Task& task, std::span<const std::pair<int, int>> fds) {
  const auto slot = static_cast<int>(ranks_.size());
  auto report = spawner_->start(slot, task, fds);
  ranks_.push_back({.rank = task.rank, .life = Life::asked, .pid = 0, .report = std::move(report)});
  results_.emplace_back();
}

void SpawnContext::Processes::wait_started(base::Deadline deadline) {
  const auto is_asked = [](const Rank& rank) { return rank.life == Life::asked; };
  while (std::any_of(ranks_.begin(), ranks_.end(), is_asked)) {
    if (take_event(deadline)) continue;
    if (spawner_->launcher_end())
      throw SessionError(fmt::format("the launcher of the ranks, their parent, {} while it started them",
                                     *spawner_->launcher_end()));
    std::vector<int> missing;
    for (const auto& rank : ranks_)
      if (is_asked(rank)) missing.push_back(rank.rank);
    throw SessionError(fmt::format("the launcher did not start ranks {} in time", fmt::join(missing, ", ")));
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
  rank.life = Life::running;
}

/// A report that cannot be taken in is a failure too.
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
  if (ended.pid == 0) throw not_forked(rank.rank, ended.error);
  rank.life = Life::ended;
  auto report = report_of(rank);
  if (report.result) results_[slot] = std::move(*report.result);
  if (ended.wait_status == 0 && !report.failure) return;
  Noticed noticed{.failure = report.failure.value_or(Failure{}),
                  .seen_ns = ended.time_ns,
                  .reported = report.failure.has_value()};
  noticed.failure.rank = rank.rank;
  if (!noticed.reported) {
    noticed.failure.time_s = static_cast<double>(ended.time_ns) / 1e9;
    if (WIFSIGNALED(ended.wait_status))
      noticed.failure.signal = WTERMSIG(ended.wait_status);
    else
      noticed.failure.exit_code = WEXITSTATUS(ended.wait_status);
  }
  failures_.push_back(std::move(noticed));
}

bool SpawnContext::Processes::all_ended() const noexcept {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.life == Life::ended; });
}

bool SpawnContext::Processes::join(base::Deadline deadline) {
  if (error_) throw SpawnError(*error_);
  if (over_) return true;
  if (!is_ours())
    throw UsageError(
        "a SpawnContext is joined by the process that called spawn(), not by one forked from it");
  while (!all_ended()) {
    if (!failures_.empty()) fail();
    if (take_event(deadline)) continue;
    if (!spawner_->launcher_end()) return false;
    lose_launcher();
  }
  if (!failures_.empty()) fail();
  spawner_->stop(base::Deadline::in_seconds(stop_timeout_s));
  over_ = true;
  return true;
}

/// Those whom the launcher's end has killed have not failed.
void SpawnContext::Processes::lose_launcher() {
  Failure failure;
  failure.phase = "launcher";
  failure.what = fmt::format("the launcher of the ranks, their parent, {}; they ended with it",
                             *spawner_->launcher_end());
  failure.time_s = static_cast<double>(real_time_ns()) / 1e9;
  failures_.push_back({.failure = std::move(failure), .seen_ns = real_time_ns(), .reported = false});
  for (auto& rank : ranks_) rank.life = Life::ended;
}

void SpawnContext::Processes::end_others() noexcept {
  try {
    const auto until = base::Deadline::in_seconds(settings_.terminate_timeout_s);
    if (!all_ended()) spawner_->signal(SIGTERM);
    while (!all_ended() && take_event(until)) {
    }
  } catch (const std::exception&) {
    // What one of them said could not be taken in. They end all the same.
  }
  spawner_->stop(base::Deadline::in_seconds(stop_timeout_s));
  for (auto& rank : ranks_) rank.life = Life::ended;
  over_ = true;
}

/// The first failure is that of the earliest end. Among ends seen together one by a signal comes first: the
/// others say when they failed, and mostly because of it.
void SpawnContext::Processes::fail() {
  while (take_event(base::Deadline::at_ns(0))) {
  }
  const auto asked_to_end_ns = real_time_ns();
  end_others();
  // Who has ended after that was made to, but for those who said before that they had failed.
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
