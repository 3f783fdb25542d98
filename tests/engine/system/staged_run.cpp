#include "staged_run.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <system_error>

namespace accelmgr::test {
namespace {

namespace fs = std::filesystem;

const std::string named_shared_memory = "/dev/shm";

/// Polls a condition that no process announces. Fails the test after a time limit.
template <class Condition>
void wait_until(Condition&& condition) {
  const auto deadline = soon();
  while (!condition()) {
    ASSERT_FALSE(deadline.passed());
    sched_yield();
  }
}

void expect_no_named_shared_memory(pid_t pid) {
  std::ifstream maps(fmt::format("/proc/{}/maps", pid));
  for (std::string line; std::getline(maps, line);)
    EXPECT_EQ(line.find(named_shared_memory + "/"), std::string::npos) << pid << " maps " << line;
  std::error_code gone;
  for (const auto& fd : fs::directory_iterator(fmt::format("/proc/{}/fd", pid), gone)) {
    const auto target = fs::read_symlink(fd, gone).string();
    EXPECT_FALSE(target.starts_with(named_shared_memory + "/")) << pid << " has open " << target;
  }
}

}  // namespace

std::optional<std::int64_t> status_number(const std::filesystem::path& status, const std::string& name) {
  std::ifstream file(status);
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(name + ":")) return std::stoll(line.substr(name.size() + 1));
  return std::nullopt;
}

pid_t parent_of(pid_t pid) {
  const auto parent = status_number(fmt::format("/proc/{}/status", pid), "PPid");
  EXPECT_TRUE(parent) << "process " << pid << " is not there";
  return static_cast<pid_t>(parent.value_or(0));
}

Processes processes_of(pid_t manager, const std::vector<pid_t>& runners) {
  Processes out;
  out.manager = ipc::open_pidfd(manager);
  const auto fork_server = parent_of(runners.at(0));
  EXPECT_EQ(parent_of(fork_server), manager);
  out.fork_server = ipc::open_pidfd(fork_server);
  for (const auto runner : runners) out.runners.push_back(ipc::open_pidfd(runner));

  expect_no_named_shared_memory(manager);
  expect_no_named_shared_memory(fork_server);
  for (const auto runner : runners) expect_no_named_shared_memory(runner);
  return out;
}

void expect_ended(const Processes& processes) {
  EXPECT_TRUE(ipc::wait_ended(processes.manager.get(), soon())) << "the manager has not ended";
  EXPECT_TRUE(ipc::wait_ended(processes.fork_server.get(), soon())) << "the fork server has not ended";
  for (const auto& runner : processes.runners)
    EXPECT_TRUE(ipc::wait_ended(runner.get(), soon())) << "a runner has not ended";
}

StagedRun::StagedRun(const Config& config) : manager_(std::in_place, config, client::StartSettings{}) {
  const auto statistics = manager_->statistics();
  std::vector<pid_t> runners;
  for (const auto& runner : statistics.runners) runners.push_back(runner.pid);
  processes_ = processes_of(statistics.manager_pid, runners);
}

StagedRun::~StagedRun() {
  manager_.reset();
  expect_ended(processes_);
  expect_nothing_left();
}

std::future<StepResult> StagedRun::step_in_background(const StepOptions& options) {
  return std::async(std::launch::async, [this, options] { return manager_->step(options); });
}

void StagedRun::wait_until_in(int rank, const std::string& phase) const {
  wait_until([&] { return statistics_of(rank).phase == phase; });
}

void StagedRun::stop_and_wait(int rank) const {
  ipc::send_signal(runner(rank), SIGSTOP);
  wait_until_stopped(rank);
}

void StagedRun::wait_until_stopped(int rank) const {
  wait_until([&] { return ipc::usage(statistics_of(rank).pid).value().state == 'T'; });
}

RunnerStatistics StagedRun::statistics_of(int rank) const {
  return manager_->statistics().runners.at(static_cast<std::size_t>(rank));
}

std::int64_t StagedRun::kill_and_wait(int pidfd) const {
  ipc::send_signal(pidfd, SIGKILL);
  EXPECT_TRUE(ipc::wait_ended(pidfd, soon()));
  return base::now_ns();
}

Config restarting(const Stage& stage) {
  auto config = staged_config(stage);
  config.runners.on_loss = LossPolicy::restart;
  config.runners.restart_backoff = 0;
  return config;
}

StagedOutcome outcome_of(StagedRun& run) {
  const auto statistics = run.manager().statistics();
  return {run.gradients(), buffers_of(run.manager()), statistics.elements, statistics.steps,
          statistics.samples};
}

void expect_same(const StagedOutcome& a, const StagedOutcome& b) {
  EXPECT_TRUE(same_bits(a.gradients, b.gradients));
  EXPECT_TRUE(same_bits(a.buffers, b.buffers));
  EXPECT_EQ(a.elements, b.elements);
  EXPECT_EQ(a.steps, b.steps);
  EXPECT_EQ(a.samples, b.samples);
}

StagedOutcome undisturbed(int steps) {
  Stage stage;
  StagedRun run(restarting(stage));
  for (int i = 0; i < steps; ++i) expect_ok(run.manager());
  return outcome_of(run);
}

}  // namespace accelmgr::test
