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

Config with_device_fault(const Stage& stage, const char* fault) {
  auto config = on_device(stage);
  config.model.options["device_fault"] = fault;
  return config;
}

/// The error of the first step on devices with that fault.
std::string error_of_step_with(const char* fault, const char* timeout_s = "60") {
  Stage stage;
  auto config = with_device_fault(stage, fault);
  config.model.options["device_timeout_s"] = timeout_s;
  StagedRun run(config);
  const auto result = run.manager().step();
  EXPECT_EQ(result.status, StepStatus::runner_lost);
  EXPECT_FALSE(result.counted);
  return result.error;
}

TEST(Device, WithoutEnoughMemoryRefusesTheStart) {
  const Stage stage;
  const auto what =
      message_of<RunnerError>([&] { client::Handle(with_device_fault(stage, "out_of_memory"), {}); });
  expect_contains(what, {"cudaMalloc: cudaErrorMemoryAllocation (2): out of memory"});
  expect_nothing_left();
}

TEST(Device, ThatMeetsAnIllegalAddressLosesItsRunner) {
  expect_contains(error_of_step_with("illegal_address"), {"cudaErrorIllegalAddress (700)"});
}

TEST(Device, ThatHangsLosesItsRunnerAtItsDeadline) {
  expect_contains(error_of_step_with("hang", "0.2"),
                  {"the device hangs: it has not done its work within 0.2 s"});
}

}  // namespace
}  // namespace accelmgr::test
