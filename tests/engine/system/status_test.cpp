// Tests of every status of a step that no lost process causes: whether the step counted, and that an
// uncounted step has added nothing.
#include <gtest/gtest.h>
#include <signal.h>

#include "base/interruption.hpp"
#include "staged_run.hpp"
#include "support.hpp"

namespace accelmgr::test {
namespace {

constexpr double short_timeout_s = 0.3;

TEST(Status, TheEndOfTheDataAndAnExceptionOfTheSourceComeAfterTheElementsBeforeThem) {
  for (const bool throws : {false, true}) {
    SCOPED_TRACE(throws);
    Stage stage;
    auto config = staged_config(stage);
    if (throws) config.data.options["throw_at"] = std::to_string(staged_ranks * staged_batch_size);
    if (!throws) config.data.elements = staged_ranks * staged_batch_size;
    RunAfterOneStep run(config);
    for (int again = 0; again < 2; ++again) {
      const auto result = run.manager().step();
      expect_failed(result, StepStatus::data_end, {throws ? "drawer 7 is on fire" : "the data has ended"});
      EXPECT_EQ(result.error_type, throws ? "DataError" : "");
      EXPECT_EQ(result.step, 1u);
      EXPECT_TRUE(run.has_added_nothing());
    }
  }
}

TEST(Status, AHangingModelIsTimedOutOrInterruptedAndItsPhaseTold) {
  constexpr double timeout_s = 2;  // Long enough for a rank to reach its forward() on a loaded machine.
  for (const bool interrupts : {false, true}) {
    Stage stage;
    RunAfterOneStep run(stage);
    stage.tell(1, Act::block);
    const auto result = interrupts ? run.manager().step({.interrupted = [&] { return stage.blocks(1); }})
                                   : run.manager().step({.timeout_s = timeout_s});
    expect_failed(result, StepStatus::timeout,
                  {interrupts ? "no result before it was interrupted" : "no result within 2 s",
                   "rank 1 in phase forward for "});
    EXPECT_GE(result.step_ms, interrupts ? 0 : timeout_s * 1e3);
    EXPECT_TRUE(run.has_added_nothing());
    stage.tell(1, Act::compute);
  }
}

TEST(Status, AStartThatIsInterruptedLeavesNothing) {
  Stage stage;
  const auto what = message_of<SessionError>([&] {
    const std::function<bool()> interrupted = [] { return true; };
    const base::InterruptionScope scope(interrupted);
    client::Handle(staged_config(stage), {});
  });
  EXPECT_NE(what.find("interrupted while it started"), std::string::npos) << what;
  expect_nothing_left();
}

TEST(Status, ARunnerThatDoesNotLeaveATimedOutStepIsEndedAfterTheGrace) {
  Stage stage;
  auto config = staged_config(stage);
  config.abort_grace = 3;  // The other runner leaves within this.
  RunAfterOneStep run(config);
  run.stop_and_wait(0);
  const auto timed_out = run.manager().step({.timeout_s = short_timeout_s});
  expect_failed(timed_out, StepStatus::timeout, {"no result within 0.3 s"});
  EXPECT_GE(timed_out.step_ms, short_timeout_s * 1e3);

  const auto lost = run.manager().step();
  expect_failed(lost, StepStatus::runner_lost, {"runner 0", "killed by signal 9 (KILL)"});
  EXPECT_EQ(lost.rank, 0);
  EXPECT_TRUE(run.has_added_nothing());
}

TEST(Status, TheGraceRunsFromTheAbortHoweverShortTheStepsDeadlinesAre) {
  Stage stage;
  auto config = staged_config(stage);
  config.abort_grace = 2;  // The other runner leaves within this.
  StagedRun run(config);
  stage.tell(0, Act::block);
  StepResult result;
  const auto deadline = soon();
  do {
    result = run.manager().step({.timeout_s = short_timeout_s});
  } while (result.status == StepStatus::timeout && !deadline.passed());
  expect_failed(result, StepStatus::runner_lost, {"runner 0", "killed by signal 9 (KILL)"});
}

// A stopped rank sees neither the beginning nor the end of the step.
TEST(Status, ARankThatSleptThroughAnAbortedStepTakesPartInTheNext) {
  Stage stage;
  RunAfterOneStep run(stage);
  run.stop_and_wait(0);
  stage.tell(1, Act::undefined_gradient);
  expect_failed(run.manager().step(), StepStatus::nonfinite, {"rank 1"});
  ipc::send_signal(run.runner(0), SIGCONT);
  stage.tell(1, Act::compute);
  EXPECT_EQ(expect_ok(run.manager()).step, 2u);
}

}  // namespace
}  // namespace accelmgr::test
