// Tests of a team that grows and shrinks, and of a manager that takes over a session.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/types.h>

#include <cstdint>
#include <string>

#include "base/interruption.hpp"
#include "staged_run.hpp"
#include "support.hpp"

namespace accelmgr::test {
namespace {

TEST(Resize, GoesUpAndDownAndAssignsEveryElementOnce) {
  Stage stage;
  auto config = restarting(stage);
  config.runners.max_runners = 3;
  StagedRun run(config);
  for (const int runners : {2, 3, 1, 2}) {
    run.manager().resize(runners);
    EXPECT_EQ(expect_ok(run.manager()).samples, std::uint64_t(runners) * staged_batch_size);
  }
  EXPECT_EQ(run.manager().statistics().elements, std::uint64_t{8 * staged_batch_size});
  EXPECT_THROW(run.manager().resize(0), UsageError);
  EXPECT_THROW(run.manager().resize(4), UsageError);
}

/// The bytes of all shared memory that are present in a process.
std::uint64_t present_shared_bytes(pid_t pid) {
  const auto kib = status_number("/proc/" + std::to_string(pid) + "/status", "RssShmem");
  EXPECT_TRUE(kib) << "process " << pid << " does not say";
  return static_cast<std::uint64_t>(kib.value_or(0)) << 10;
}

TEST(Resize, TheSlabsOfThoseWhoComeArePresentInTheOthersBeforeTheNextStep) {
  constexpr std::uint64_t width = 1 << 17;
  Stage stage;
  auto config = restarting(stage);
  config.runners.max_runners = 3;
  config.model.options["hidden"] = std::to_string(width);
  RunAfterOneStep run(config);
  const auto pid = run.manager().statistics().runners.at(0).pid;
  const auto before = present_shared_bytes(pid);
  run.manager().resize(3);
  const auto deadline = soon();
  while (present_shared_bytes(pid) < before + 4 * width * sizeof(float)) {
    ASSERT_FALSE(deadline.passed()) << present_shared_bytes(pid) << " bytes, " << before << " before";
    sched_yield();
  }
}

TEST(Resize, BeyondTheLimitOfMemoryIsRefusedAndNothingHasChanged) {
  Stage stage;
  auto config = staged_config(stage);
  config.runners.max_runners = 3;
  {
    StagedRun run(config);
    config.memory.limit_bytes = static_cast<std::int64_t>(run.manager().statistics().session_bytes);
  }
  StagedRun run(config);
  expect_contains(message_of<SessionError>([&] { run.manager().resize(3); }), {"memory.limit_bytes"});
  EXPECT_EQ(expect_ok(run.manager()).participants, 2u);
  run.manager().resize(1);
  run.manager().resize(2);
  EXPECT_EQ(expect_ok(run.manager()).participants, 2u);
}

// The withheld elements keep the loader from assigning to the remaining rank until the other rank is back.
TEST(Resize, ATeamThatGrowsBackWaitsForTheShardingThatTheSmallerOneAskedFor) {
  const auto expected = undisturbed(2);
  Stage stage;
  stage.withhold_elements_from(2 * staged_ranks * staged_batch_size);
  auto config = staged_config(stage);
  config.runners.on_loss = LossPolicy::shrink;
  RunAfterOneStep run(config);
  stage.wait_until_withheld();
  run.wait_until_waiting(0);
  run.kill_and_wait(run.runner(1));
  const auto deadline = soon();
  while (run.manager().statistics().runners.size() == 2 && !deadline.passed()) sched_yield();
  int asked = 0;
  expect_failed(run.manager().step({.interrupted = [&] { return ++asked > 1; }}), StepStatus::timeout,
                {"no attempt could begin", "until the data source returns"});

  const std::function<bool()> ready_for_long = [&, looks = 0]() mutable {
    const auto runners = run.manager().statistics().runners;
    return runners.size() == 2 && runners[1].phase == "waiting" && ++looks > 25;
  };
  {
    const base::InterruptionScope scope(ready_for_long);
    EXPECT_THROW(run.manager().resize(2), Error) << "nothing has come of the sharding";
  }
  stage.release_elements();
  expect_ok(run.manager());
  expect_same(outcome_of(run), expected);
}

TEST(Recover, TrainingGoesOnOverTheSameSession) {
  const auto expected = undisturbed(3);
  Stage stage;
  RunAfterOneStep run(restarting(stage));
  EXPECT_THROW(run.manager().recover(), UsageError) << "there is a manager";
  stage.tell(1, Act::block);
  auto step = run.step_in_background();
  stage.wait_until_blocked(1);
  run.kill_and_wait(run.processes().manager.get());
  const auto result = step.get();
  stage.tell(1, Act::compute);
  expect_failed(result, StepStatus::manager_lost, {"killed by signal 9 (KILL)"});
  ASSERT_EQ(result.causes.size(), 1u);
  EXPECT_EQ(result.causes[0].exit, "killed by signal 9 (KILL)");
  run.manager().recover();
  expect_ok(run.manager());
  expect_ok(run.manager());
  expect_same(outcome_of(run), expected);
}

}  // namespace
}  // namespace accelmgr::test
