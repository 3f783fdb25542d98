// Tests of replicas on the transport for devices, with a fake device. It answers while the runner waits for
// it, and drops work whose result is not needed any more.
#include <gtest/gtest.h>

#include "staged_run.hpp"

namespace accelmgr::test {
namespace {

Config on_device(const Stage& stage) {
  auto config = staged_config(stage);
  config.model.kind = staged_on_fake_device;
  return config;
}

StagedOutcome undisturbed_on_device(int steps) {
  Stage stage;
  StagedRun run(on_device(stage));
  for (int i = 0; i < steps; ++i) expect_ok(run.manager());
  return outcome_of(run);
}

TEST(Device, ComputesWhatTheHostDoes) { expect_same(undisturbed_on_device(3), undisturbed(3)); }

TEST(Device, WhoseStepTimesOutLeavesItAndTheNextIsRight) {
  const auto expected = undisturbed_on_device(2);
  Stage stage;
  auto config = on_device(stage);
  config.abort_grace = 30;
  RunAfterOneStep run(config);
  stage.tell(1, Act::block);
  auto step = run.step_in_background({.timeout_s = 2});
  stage.wait_until_blocked(1);
  expect_failed(step.get(), StepStatus::timeout, {"no result within 2 s", "rank 1 in phase backward"});
  EXPECT_TRUE(run.has_added_nothing());
  run.wait_until_waiting(1);  // It was not told to go on: the replica dropped the work by itself.
  EXPECT_FALSE(stage.blocks(1));
  stage.tell(1, Act::compute);
  EXPECT_EQ(expect_ok(run.manager()).tries, 1u);
  EXPECT_EQ(run.manager().statistics().losses, 0u);
  expect_same(outcome_of(run), expected);
}

TEST(Device, ThatTakesLongIsNotTakenForOneThatHangs) {
  const auto expected = undisturbed_on_device(2);
  Stage stage;
  auto config = on_device(stage);
  config.runners.hang_timeout = 0.5;
  RunAfterOneStep run(config);
  stage.tell(1, Act::block);
  const auto begin = base::now_ns();
  const auto long_enough = [&] {
    if (double(base::now_ns() - begin) / 1e9 > 4 * config.runners.hang_timeout) stage.tell(1, Act::compute);
    return false;
  };
  EXPECT_EQ(expect_ok(run.manager(), {.interrupted = long_enough}).tries, 1u);
  EXPECT_EQ(run.manager().statistics().losses, 0u);
  expect_same(outcome_of(run), expected);
}

}  // namespace
}  // namespace accelmgr::test
