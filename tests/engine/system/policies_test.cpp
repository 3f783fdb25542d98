// Tests of `runners.on_loss` and `on_nonfinite`: training goes on, and ends with the result of an undisturbed
// run.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "staged_run.hpp"
#include "support.hpp"

namespace accelmgr::test {
namespace {

constexpr double long_window_s = 600;  // Restarts fall within it on a loaded machine too.

TEST(Restart, AStepWhoseRunnerIsKilledIsRepeatedWithTheSameElements) {
  const auto expected = undisturbed(3);
  Stage stage;
  RunAfterOneStep run(restarting(stage));
  stage.tell(1, Act::block);
  auto step = run.step_in_background();
  stage.wait_until_blocked(1);
  run.kill_and_wait(run.runner(1));
  stage.tell(1, Act::compute);
  const auto result = step.get();
  EXPECT_EQ(result.status, StepStatus::ok) << result.error;
  EXPECT_TRUE(result.counted);
  EXPECT_EQ(result.tries, 2u);
  expect_ok(run.manager());
  expect_same(outcome_of(run), expected);
  EXPECT_EQ(run.manager().statistics().replacements, 1u);
  EXPECT_EQ(run.manager().statistics().runners.at(1).generation, 2u);
}

TEST(Restart, WhatIsKilledBetweenStepsIsReplacedBeforeTheNext) {
  const auto expected = undisturbed(3);
  for (const bool all : {false, true}) {  // A runner, or the fork server with all its runners.
    SCOPED_TRACE(all);
    Stage stage;
    RunAfterOneStep run(restarting(stage));
    run.wait_until_waiting(0);
    run.kill_and_wait(all ? run.processes().fork_server.get() : run.runner(0));
    const auto result = expect_ok(run.manager());
    EXPECT_TRUE(all || result.tries == 1u) << result.tries;
    expect_ok(run.manager());
    expect_same(outcome_of(run), expected);
    EXPECT_EQ(run.manager().statistics().losses, 1u);
  }
}

TEST(Restart, ACrashLoopEndsWithItsLastThreeCauses) {
  Stage stage;
  auto config = restarting(stage);
  config.runners.restarts_per_window = 3;
  config.runners.restart_window = long_window_s;
  RunAfterOneStep run(config);
  stage.tell(1, Act::throw_exception);
  const auto result = run.manager().step();
  expect_failed(result, StepStatus::runner_lost,
                {"3 restarts within 600 s (runners.restarts_per_window)", "runner 1", "the stage collapsed"});
  ASSERT_EQ(result.causes.size(), 3u);
  for (const auto& cause : result.causes) {
    EXPECT_EQ(cause.rank, 1);
    EXPECT_EQ(cause.exit, "exit code 17");
    EXPECT_EQ(cause.what, "the stage collapsed");
    EXPECT_EQ(cause.step, 2u);
    EXPECT_EQ(cause.phase, "forward");
  }
  EXPECT_LT(result.causes[0].time_s, result.causes[2].time_s);
  EXPECT_NE(result.causes[0].pid, result.causes[2].pid);
  ASSERT_FALSE(result.causes[2].log.empty());
  EXPECT_NE(result.causes[2].log.back().find("the stage collapsed"), std::string::npos);
  EXPECT_TRUE(run.has_added_nothing());
}

rlim_t lowest_free_descriptor() {
  rlim_t lowest = 0;
  while (fcntl(static_cast<int>(lowest), F_GETFD) >= 0) ++lowest;
  return lowest;
}

/// Lets a process open no descriptor from `limit` on while this object exists. A poll of more than that fails
/// too.
class NoDescriptors {
 public:
  NoDescriptors(pid_t pid, rlim_t limit) : pid_(pid) {
    set({.rlim_cur = limit, .rlim_max = before_.rlim_max});
  }
  ~NoDescriptors() { set(before_); }
  NoDescriptors(const NoDescriptors&) = delete;
  NoDescriptors& operator=(const NoDescriptors&) = delete;

 private:
  static rlimit current() {
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    return limit;
  }
  void set(const rlimit& limit) const { EXPECT_EQ(prlimit(pid_, RLIMIT_NOFILE, &limit, nullptr), 0); }

  pid_t pid_;
  rlimit before_ = current();
};

/// Steps that time out, until the host could not take the descriptors of a replacement.
void step_until_descriptors_lack(client::Handle& manager) {
  std::string error;
  for (const auto deadline = soon(); error.find("ulimit -n") == std::string::npos && !deadline.passed();)
    error = manager.step({.timeout_s = 1}).error;
  EXPECT_NE(error.find("ulimit -n"), std::string::npos) << error;
}

TEST(NoDescriptors, InTheHostForAReplacementAreToldAndItTakesPartWhenThereAre) {
  const auto expected = undisturbed(2);
  Stage stage;
  RunAfterOneStep run(restarting(stage));
  {
    const NoDescriptors none(getpid(), lowest_free_descriptor());
    run.kill_and_wait(run.runner(1));
    step_until_descriptors_lack(run.manager());
    expect_failed(run.manager().step({.timeout_s = 1}), StepStatus::timeout,
                  {"no attempt could begin within 1 s", "ulimit -n", "Too many open files"});
  }
  expect_ok(run.manager());
  expect_same(outcome_of(run), expected);
}

TEST(NoDescriptors, InTheHostForAReplacementEndAResizeAtItsDeadline) {
  Stage stage;
  auto config = restarting(stage);
  config.start_timeout = 3;
  StagedRun run(config);
  const NoDescriptors none(getpid(), lowest_free_descriptor());
  run.kill_and_wait(run.runner(1));
  step_until_descriptors_lack(run.manager());
  expect_contains(message_of<SessionError>([&] { run.manager().resize(1); }), {"ulimit -n"});
}

TEST(Interruption, ThatThrowsLeavesNoStepOpen) {
  const auto expected = undisturbed(2);
  Stage stage;
  RunAfterOneStep run(restarting(stage));
  stage.tell(1, Act::block);
  const auto interrupted = [&] {
    if (stage.blocks(1)) throw std::runtime_error("enough");
    return false;
  };
  EXPECT_EQ(message_of<std::runtime_error>([&] { run.manager().step({.interrupted = interrupted}); }),
            "enough");
  stage.tell(1, Act::compute);
  expect_ok(run.manager());
  expect_same(outcome_of(run), expected);
}

/// How often the other threads of this process have gone to sleep.
std::uint64_t waits_of_other_threads() {
  std::uint64_t sum = 0;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
    if (thread.path().filename() == std::to_string(gettid())) continue;
    sum += static_cast<std::uint64_t>(
        status_number(thread.path() / "status", "voluntary_ctxt_switches").value_or(0));
  }
  return sum;
}

/// Returns when the thread that makes a step has looked at the other processes again.
void wait_until_looked() {
  const auto before = waits_of_other_threads();
  for (const auto deadline = soon(); waits_of_other_threads() < before + 2 && !deadline.passed();)
    sched_yield();
}

/// Stops these processes and this one for `length`, as `docker pause` does. The pause is what is tested, so
/// it is a sleep. This process goes on first, and looks at the others while they are still stopped.
void pause_all(const std::vector<pid_t>& pids, std::chrono::seconds length) {
  wait_until_looked();
  const pid_t self = getpid();
  const pid_t watch = fork();
  if (watch == 0) {
    for (const pid_t pid : pids) kill(pid, SIGSTOP);
    kill(self, SIGSTOP);
    const timespec pause{.tv_sec = length.count(), .tv_nsec = 0};
    nanosleep(&pause, nullptr);
    kill(self, SIGCONT);
    _exit(0);
  }
  EXPECT_EQ(waitpid(watch, nullptr, 0), watch);
  wait_until_looked();
  for (const pid_t pid : pids) kill(pid, SIGCONT);
}

TEST(Pause, OfAllProcessesInsideACommitLosesNobody) {
  const auto expected = undisturbed(2);
  Stage stage;
  auto config = restarting(stage);
  config.faults = {"rank=1 step=2 phase=publish fault=stop"};
  RunAfterOneStep run(config);
  auto step = run.step_in_background();
  run.wait_until_stopped(1);
  const auto statistics = run.manager().statistics();
  const auto runner_0 = statistics.runners.at(0).pid, runner_1 = statistics.runners.at(1).pid;
  // Longer than the host waits for a committed attempt that makes no progress.
  pause_all({statistics.manager_pid, parent_of(runner_0), runner_0, runner_1}, std::chrono::seconds(6));
  const auto result = step.get();
  EXPECT_EQ(result.status, StepStatus::ok) << result.error;
  EXPECT_EQ(result.tries, 1u);
  EXPECT_EQ(run.manager().statistics().losses, 0u);
  expect_same(outcome_of(run), expected);
}

TEST(Shrink, TheRestGoOnWithTrueCountsAndEveryElementIsTrainedOnce) {
  Stage stage;
  auto config = staged_config(stage);
  config.runners.on_loss = LossPolicy::shrink;
  StagedRun run(config);
  EXPECT_EQ(expect_ok(run.manager()).participants, 2u);
  run.wait_until_waiting(1);
  run.kill_and_wait(run.runner(1));
  const auto result = expect_ok(run.manager());
  EXPECT_EQ(result.participants, 1u);
  EXPECT_EQ(result.samples, std::uint64_t{staged_batch_size});
  EXPECT_EQ(run.manager().statistics().elements, std::uint64_t{3 * staged_batch_size});
  EXPECT_EQ(run.manager().statistics().runners.size(), 1u);
}

Config with_nonfinite(const Stage& stage, NonfinitePolicy policy, int limit) {
  auto config = staged_config(stage);
  config.on_nonfinite = policy;
  config.nonfinite_limit = limit;
  return config;
}

TEST(Nonfinite, AbortNamesWhatItIsAndHandsOutTheSameBatches) {
  const auto expected = undisturbed(2);
  for (const auto& [act, what] : {std::pair{Act::infinite_loss, "loss is inf"},
                                  {Act::undefined_gradient, "gradient of 'output.bias' is not finite"}}) {
    SCOPED_TRACE(what);
    Stage stage;
    RunAfterOneStep run(with_nonfinite(stage, NonfinitePolicy::abort, 10));
    stage.tell(1, act);
    const auto result = run.manager().step();
    expect_failed(result, StepStatus::nonfinite, {"rank 1", what, "loss"});
    EXPECT_EQ(result.rank, 1);
    EXPECT_TRUE(run.has_added_nothing());
    stage.tell(1, Act::compute);
    expect_ok(run.manager());
    expect_same(outcome_of(run), expected);
  }
}

TEST(Nonfinite, SkipBatchConsumesTheBatchesAndNothingElseUpToALimitInARow) {
  Stage stage;
  RunAfterOneStep run(with_nonfinite(stage, NonfinitePolicy::skip_batch, 3));
  stage.tell_once(1, Act::infinite_loss);
  const auto result = expect_ok(run.manager());
  EXPECT_EQ(result.skipped, 1u);
  EXPECT_EQ(result.tries, 2u);
  EXPECT_EQ(result.step, 2u);
  const auto statistics = run.manager().statistics();
  EXPECT_EQ(statistics.skips, 1u);
  EXPECT_EQ(statistics.samples, std::uint64_t{2 * 2 * staged_batch_size});
  EXPECT_EQ(statistics.elements, std::uint64_t{3 * 2 * staged_batch_size});
  const auto gradients = run.gradients();
  stage.tell(0, Act::infinite_loss);
  const auto failed = run.manager().step();
  expect_failed(failed, StepStatus::nonfinite, {"rank 0", "the loss is inf"});
  EXPECT_EQ(failed.skipped, 3u);
  EXPECT_TRUE(same_bits(run.gradients(), gradients));
}

// The host finishes the committed attempt, so its batches are consumed. A skip has no gradients, so the step
// does not count.
TEST(Nonfinite, ASkipThatTheManagersEndLeftToTheHostDoesNotCount) {
  constexpr int elements = 2 * staged_ranks * staged_batch_size;
  Stage stage;
  stage.withhold_elements_from(elements);
  auto config = with_nonfinite(stage, NonfinitePolicy::skip_batch, 10);
  config.faults = {"rank=1 step=2 phase=forward fault=nan", "rank=1 step=2 phase=publish fault=hang"};
  config.runners.reduction_timeout = 60;  // The host does not finish it before the manager is killed.
  RunAfterOneStep run(config);
  stage.wait_until_withheld();
  run.wait_until_waiting(1);
  ipc::send_signal(run.processes().manager.get(), SIGSTOP);  // Only the host can finish rank 1's slice.
  auto step = run.step_in_background();
  run.wait_until_in(1, "reduce");
  run.kill_and_wait(run.processes().manager.get());
  expect_failed(step.get(), StepStatus::manager_lost, {});
  EXPECT_TRUE(run.has_added_nothing());
  EXPECT_EQ(run.manager().statistics().elements, std::uint64_t{elements}) << "nothing was skipped";
}

TEST(Nonfinite, KeepHasALimitInARow) {
  Stage stage;
  StagedRun run(with_nonfinite(stage, NonfinitePolicy::keep, 2));
  stage.tell(0, Act::infinite_loss);
  for (int i = 0; i < 2; ++i) {
    const auto result = expect_ok(run.manager());
    EXPECT_TRUE(result.nonfinite);
  }
  expect_failed(run.manager().step(), StepStatus::nonfinite, {"rank 0"});
}

}  // namespace
}  // namespace accelmgr::test
