// What is refused, with which words, and that nothing is left afterwards.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <regex>

#include "roles.hpp"
#include "staged_run.hpp"
#include "support.hpp"

namespace accelmgr::test {
namespace {

/// The message of the exception of just this type with which no manager is started.
template <class Exception>
std::string refusal_of(const Config& config) {
  const auto what = message_of<Exception>([&] { Manager::start(config); });
  expect_nothing_left();
  return what;
}

TEST(BadInput, StartWithoutInitIsRefused) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  base::UniqueFd out(ends[0]), in(ends[1]);
  const std::pair<int, int> fds[] = {{in.get(), role_says}};
  const auto child = ipc::execute_self({role_argument, starts_without_init}, fds);
  in.reset();
  char text[512] = {};
  EXPECT_GT(read(out.get(), text, sizeof text - 1), 0);
  expect_contains(text, {"Manager::start()", "without", "accelmgr::init(argc, argv)"});
  int status = -1;
  EXPECT_EQ(waitpid(child.pid, &status, 0), child.pid);
  EXPECT_EQ(ipc::describe_exit(status), "exit code 0");
  expect_nothing_left();
}

TEST(BadInput, ASecondThreadInAHandleIsRefusedAndTheFirstGoesOn) {
  Stage stage;
  StagedRun run(stage);
  stage.tell(0, Act::block);
  auto step = run.step_in_background();
  stage.wait_until_blocked(0);
  expect_contains(message_of<UsageError>([&] { run.manager().step(); }), {"step()", "another thread"});
  expect_contains(message_of<UsageError>([&] { run.manager().zero_grad(); }),
                  {"zero_grad()", "another thread"});
  expect_contains(message_of<UsageError>([&] { run.manager().stop(); }), {"stop()", "another thread"});
  stage.tell(0, Act::compute);
  const auto result = step.get();
  EXPECT_TRUE(result.counted) << result.error;
  expect_ok(run.manager());
}

TEST(BadInput, InAForkedChildTheHandleIsClosedAndTheParentUnharmed) {
  Stage stage;
  StagedRun run(stage);
  expect_ok(run.manager());
  const auto child = fork();
  if (child == 0) {
    const auto refused = [](auto&& call) {
      try {
        call();
      } catch (const UsageError& error) {
        return std::string(error.what()).find("forked child") != std::string::npos;
      }
      return false;
    };
    bool all = true;
    {
      Manager dead = std::move(run.manager());
      all = refused([&] { dead.step(); }) && refused([&] { dead.zero_grad(); }) &&
            refused([&] { dead.gradients(); }) && refused([&] { dead.stop(); });
      dead.kill();
    }
    _exit(all ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(ipc::describe_exit(status), "exit code 0");
  expect_ok(run.manager());
}

TEST(BadInput, AStepAfterStopIsRefusedAndTheGradientsStayReadable) {
  Stage stage;
  StagedRun run(stage);
  expect_ok(run.manager());
  const auto gradients = run.gradients();
  run.manager().stop();
  run.manager().stop();
  expect_contains(message_of<UsageError>([&] { run.manager().step(); }), {"step()", "after stop()"});
  EXPECT_TRUE(same_bits(run.gradients(), gradients));
}

TEST(BadInput, ZeroRunnersAreRefused) {
  const Stage stage;
  auto config = staged_config(stage);
  config.nprocs = 0;
  expect_contains(refusal_of<ConfigError>(config), {"nprocs", "0", "1", "24"});
}

TEST(BadInput, ASessionBeyondTheLimitIsRefusedWithBothNumbers) {
  const Stage stage;
  auto config = staged_config(stage);
  std::string needed;
  {
    StagedRun run(config);
    needed = std::to_string(run.manager().statistics().session_bytes);
  }
  config.memory.limit_bytes = 1'234'567;
  expect_contains(refusal_of<SessionError>(config), {needed + " bytes", "memory.limit_bytes", "1234567"});
}

TEST(BadInput, ASessionBeyondTheMachinesMemoryIsRefusedWithBothNumbers) {
  const Stage stage;
  auto config = staged_config(stage);
  config.grad_accumulation_steps = 1 << 20;  // Slots of a step are kept until it is committed.
  config.batch_size_per_device = 1 << 20;
  const auto what = refusal_of<SessionError>(config);
  EXPECT_TRUE(std::regex_search(what, std::regex("needs [0-9]{13,} bytes.*, [0-9]{7,} are available")))
      << what;
}

TEST(BadInput, AnUnknownModelIsRefusedWithTheNearestName) {
  const Stage stage;
  auto config = staged_config(stage);
  config.model.kind = "stagd";
  expect_contains(refusal_of<ConfigError>(config), {"stagd", "staged"});
}

TEST(BadInput, AnUnknownDataSourceIsRefusedWithTheNearestName) {
  const Stage stage;
  auto config = staged_config(stage);
  config.data.kind = "stagd";
  expect_contains(refusal_of<ConfigError>(config), {"stagd", "staged"});
}

class BadModel : public testing::Test {
 protected:
  /// The error of the step in which rank 1 does `act`; nothing of it is in the gradients.
  StepResult step_with(Act act) {
    StagedRun run(stage_);
    expect_ok(run.manager());
    const auto gradients = run.gradients();
    stage_.tell(1, act);
    auto result = run.manager().step();
    EXPECT_EQ(result.rank, 1);
    EXPECT_TRUE(same_bits(run.gradients(), gradients));
    return result;
  }

 private:
  Stage stage_;
};

TEST_F(BadModel, ALossThatIsNoScalarIsRefusedWithItsShape) {
  const auto result = step_with(Act::vector_loss);
  expect_failed(result, StepStatus::runner_lost, {"runner 1", "loss", "[4, 1]", "mean()"});
  EXPECT_EQ(result.error_type, "ModelError");
}

TEST_F(BadModel, OneThatWritesItsParameterIsToldWhich) {
  expect_failed(step_with(Act::write_parameter), StepStatus::runner_lost,
                {"runner 1", "phase forward", "'output.bias'", "runners.protect_parameters"});
}

TEST_F(BadModel, OneThatReplacesItsParameterIsToldWhich) {
  const auto result = step_with(Act::replace_parameter);
  expect_failed(result, StepStatus::runner_lost, {"runner 1", "'hidden.weight'", "replaced"});
  EXPECT_EQ(result.error_type, "ModelError");
}

/// The error of the second step, whose first element has what the option says.
StepResult step_with_element(const std::string& option) {
  Stage stage;
  auto config = staged_config(stage);
  config.data.options[option] = std::to_string(staged_ranks * staged_batch_size);
  StagedRun run(config);
  expect_ok(run.manager());
  return run.manager().step();
}

TEST(BadData, AnElementOfAnotherDtypeThanDeclaredIsRefusedWithBoth) {
  const auto result = step_with_element("double_at");
  expect_failed(result, StepStatus::data_end, {"'input'", "expected float32 [8]", "got float64 [8]"});
  EXPECT_EQ(result.error_type, "DataError");
}

TEST(BadData, AnElementOfAnotherShapeThanDeclaredIsRefusedWithBoth) {
  const auto result = step_with_element("longer_at");
  expect_failed(result, StepStatus::data_end, {"'input'", "expected float32 [8]", "got float32 [9]"});
  EXPECT_EQ(result.error_type, "DataError");
}

Config torchscript_config(const Stage& stage, const std::string& file) {
  auto config = staged_config(stage);
  config.model.kind = "torchscript";
  config.model.file = file;
  config.data.kind = "vectors";
  return config;
}

TEST(BadTorchScript, AFileThatIsNoneIsRefused) {
  const Stage stage;
  const std::string file = "/proc/self/exe";
  expect_contains(refusal_of<ModelError>(torchscript_config(stage, file)), {file, "torch.jit.save"});
}

TEST(BadTorchScript, AFileThatIsNotThereIsRefused) {
  const Stage stage;
  expect_contains(refusal_of<ModelError>(torchscript_config(stage, "/nowhere/model.pt")),
                  {"model.file", "/nowhere/model.pt"});
}

TEST(BadTorchScript, AnOutputWithoutLossIsRefusedWithWhatItHas) {
  const Stage stage;
  StagedRun run(torchscript_config(stage, SCRIPT_FOLDER "/DictWithoutLoss.pt"));
  const auto result = run.manager().step();
  expect_failed(result, StepStatus::runner_lost, {"DictWithoutLoss.pt", "without a tensor 'loss'"});
  EXPECT_EQ(result.error_type, "ModelError");
}

}  // namespace
}  // namespace accelmgr::test
