// Checks which input is refused, with which words, and that nothing is left afterwards.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/interruption.hpp"
#include "role_process.hpp"
#include "staged_run.hpp"
#include "support.hpp"

namespace accelmgr::test {
namespace {

/// Starts a manager without init(), and says the exception's text.
constexpr const char* starts_without_init = "starts_without_init";
const RegisteredRole starter(starts_without_init, [](const Arguments&, int, char**) {
  say(message_of<UsageError>([] { client::Handle(Config{}, {}); }));
  return 0;
});

TEST(BadInput, StartWithoutInitIsRefused) {
  RoleProcess child(starts_without_init, {});
  expect_contains(child.line(), {"Manager::start()", "without", "accelmgr::init(argc, argv)"});
  EXPECT_EQ(ipc::describe_exit(child.status()), "exit code 0");
  expect_nothing_left();
}

TEST(BadInput, ASecondThreadInAHandleIsRefusedAndTheFirstGoesOn) {
  Stage stage;
  StagedRun run(stage);
  stage.tell(0, Act::block);
  auto step = run.step_in_background();
  stage.wait_until_blocked(0);
  expect_contains(message_of<UsageError>([&] { run.manager().step(); }), {"step()", "another thread"});
  expect_contains(message_of<UsageError>([&] { run.manager().zero_grad(); }), {"zero_grad()"});
  expect_contains(message_of<UsageError>([&] { run.manager().stop(); }), {"stop()"});
  stage.tell(0, Act::compute);
  const auto result = step.get();
  EXPECT_TRUE(result.counted) << result.error;
  expect_ok(run.manager());
}

TEST(BadInput, InAForkedChildTheHandleIsClosedAndTheParentUnharmed) {
  Stage stage;
  RunAfterOneStep run(stage);
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
      client::Handle dead = std::move(run.manager());
      all = refused([&] { dead.step(); }) && refused([&] { dead.zero_grad(); }) &&
            refused([&] { dead.buffers(); }) && refused([&] { dead.stop(); });
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
  RunAfterOneStep run(stage);
  run.manager().stop();
  run.manager().stop();
  expect_contains(message_of<UsageError>([&] { run.manager().step(); }), {"step()", "after stop()"});
  EXPECT_TRUE(run.has_added_nothing());
}

TEST(BadInput, ZeroRunnersAreRefused) {
  const Stage stage;
  auto config = staged_config(stage);
  config.nprocs = 0;
  expect_contains(message_of<ConfigError>([&] { client::Handle(config, {}); }), {"nprocs"});
  expect_nothing_left();
}

// Without a word of the end of the manager that has refused it.
TEST(BadInput, ASessionBeyondTheLimitIsRefusedWithBothNumbers) {
  const Stage stage;
  auto config = staged_config(stage);
  std::string needed;
  {
    StagedRun run(config);
    needed = std::to_string(run.manager().statistics().session_bytes);
  }
  config.memory.limit_bytes = 1'234'567;
  const std::function<bool()> when_it_has_ended = [] {
    siginfo_t ended{};
    EXPECT_EQ(waitid(P_ALL, 0, &ended, WEXITED | WNOWAIT), 0);
    return false;
  };
  const auto what = message_of<SessionError>([&] {
    const base::InterruptionScope scope(when_it_has_ended);
    client::Handle(config, {});
  });
  expect_contains(what, {needed + " bytes", "memory.limit_bytes", "1234567"});
  EXPECT_EQ(what.find("manager process"), std::string::npos) << what;
  expect_nothing_left();
}

TEST(BadInput, AnUnknownModelOrDataSourceIsRefusedWithTheNearestName) {
  const Stage stage;
  auto of_model = staged_config(stage), of_data = of_model;
  of_model.model.kind = of_data.data.kind = "stagd";
  for (const auto& config : {of_model, of_data})
    expect_contains(message_of<ConfigError>([&] { client::Handle(config, {}); }), {"stagd", "staged"});
  expect_nothing_left();
}

TEST(BadInput, AModelThatWritesItsParameterIsToldWhich) {
  Stage stage;
  RunAfterOneStep run(stage);
  stage.tell(1, Act::write_parameter);
  const auto result = run.manager().step();
  expect_failed(result, StepStatus::runner_lost, {"'output.bias'", "runners.protect_parameters"});
  EXPECT_EQ(result.rank, 1);
  EXPECT_TRUE(run.has_added_nothing());
}

}  // namespace
}  // namespace accelmgr::test
