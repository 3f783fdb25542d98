#include "staged_run.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>

#include <filesystem>
#include <fstream>
#include <system_error>

#include "support.hpp"

namespace accelmgr::test {
namespace {

namespace fs = std::filesystem;

const fs::path named_shared_memory = "/dev/shm";

/// For what nobody reports. Fails the test after a bound.
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
    EXPECT_EQ(line.find(named_shared_memory.string() + "/"), std::string::npos) << pid << " maps " << line;
  std::error_code gone;
  for (const auto& fd : fs::directory_iterator(fmt::format("/proc/{}/fd", pid), gone)) {
    const auto target = fs::read_symlink(fd, gone).string();
    EXPECT_FALSE(target.starts_with(named_shared_memory.string() + "/")) << pid << " has open " << target;
  }
}

}  // namespace

pid_t parent_of(pid_t pid) {
  std::ifstream status(fmt::format("/proc/{}/status", pid));
  const std::string label = "PPid:";
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(label)) return std::stoi(line.substr(label.size()));
  ADD_FAILURE() << "process " << pid << " is not there";
  return 0;
}

Processes processes_of(pid_t manager, const std::vector<pid_t>& runners) {
  Processes out;
  out.manager = ipc::open_pidfd(manager);
  const auto launcher = parent_of(runners.at(0));
  EXPECT_EQ(parent_of(launcher), manager);
  out.launcher = ipc::open_pidfd(launcher);
  for (const auto runner : runners) out.runners.push_back(ipc::open_pidfd(runner));

  expect_no_named_shared_memory(manager);
  expect_no_named_shared_memory(launcher);
  for (const auto runner : runners) expect_no_named_shared_memory(runner);
  return out;
}

void expect_ended(const Processes& processes) {
  EXPECT_TRUE(ipc::wait_ended(processes.manager.get(), soon())) << "the manager has not ended";
  EXPECT_TRUE(ipc::wait_ended(processes.launcher.get(), soon())) << "the launcher has not ended";
  for (const auto& runner : processes.runners)
    EXPECT_TRUE(ipc::wait_ended(runner.get(), soon())) << "a runner has not ended";
}

std::string left_behind() {
  const auto deadline = soon();
  pid_t reaped = 0;
  while (reaped != -1 && !deadline.passed()) {
    reaped = waitpid(-1, nullptr, WNOHANG);
    if (reaped == 0) sched_yield();  // It may be on its way out.
  }
  if (reaped != -1) return "a process is left";
  for (const auto& entry : fs::directory_iterator(named_shared_memory))
    if (entry.path().string().find("accelmgr") != std::string::npos) return entry.path();
  return {};
}

void expect_nothing_left() { EXPECT_EQ(left_behind(), ""); }

StagedRun::StagedRun(const Config& config) : manager_(Manager::start(config)) {
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

std::vector<at::Tensor> StagedRun::gradients() const { return copies(manager_->gradients()); }

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
  return {run.gradients(), copies(run.manager().buffers()), statistics.elements, statistics.steps,
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

void expect_failed(const StepResult& result, StepStatus status, std::initializer_list<std::string> parts) {
  EXPECT_STREQ(to_string(result.status), to_string(status)) << result.error;
  EXPECT_FALSE(result);
  EXPECT_FALSE(result.counted);
  EXPECT_EQ(result.samples, 0u);
  EXPECT_EQ(result.loss, 0);
  expect_contains(result.error, parts);
}

void expect_contains(const std::string& text, std::initializer_list<std::string> parts) {
  for (const auto& part : parts)
    EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' in: " << text;
}

}  // namespace accelmgr::test
