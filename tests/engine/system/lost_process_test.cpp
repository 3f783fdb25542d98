// Checks that after the death of any process the step says so and does not count, and that nothing is left.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <optional>
#include <sstream>

#include "accelmgr/init.hpp"
#include "base/config/start_method.hpp"
#include "base/ipc/process.hpp"
#include "role_process.hpp"
#include "staged_run.hpp"
#include "support.hpp"

namespace accelmgr::test {
namespace {

TEST(LostForkServer, TakesTheRunnersWithIt) {
  Stage stage;
  RunAfterOneStep run(stage);
  stage.tell(0, Act::block);
  stage.tell(1, Act::block);
  auto step = run.step_in_background();
  stage.wait_until_blocked(0);
  stage.wait_until_blocked(1);
  run.kill_and_wait(run.processes().fork_server.get());
  const auto result = step.get();
  expect_failed(result, StepStatus::runner_lost,
                {"the fork server (pid", "killed by signal 9 (KILL)", "all runners with it"});
  EXPECT_TRUE(run.has_added_nothing());
}

/// What rank 1 does when the manager is killed: it waits for the next step, or blocks in one, or has made one
/// fail. An aborted attempt leaves gradients in the slabs, which no recovery may add to the master.
class LostManager : public testing::TestWithParam<Act> {};

TEST_P(LostManager, LeavesTheGradientsReadableAndTakesItsProcessesWithIt) {
  Stage stage;
  RunAfterOneStep run(stage);
  stage.tell(1, GetParam());
  std::future<StepResult> step;
  if (GetParam() == Act::block) {
    step = run.step_in_background();
    stage.wait_until_blocked(1);
  } else if (GetParam() == Act::undefined_gradient) {
    EXPECT_EQ(run.manager().step().status, StepStatus::nonfinite);
  }
  run.kill_and_wait(run.processes().manager.get());
  if (step.valid())
    expect_failed(step.get(), StepStatus::manager_lost, {"manager", "killed by signal 9 (KILL)"});
  expect_ended(run.processes());
  EXPECT_TRUE(run.has_added_nothing());
  expect_failed(run.manager().step(), StepStatus::manager_lost, {"manager", "killed by signal 9 (KILL)"});
  run.manager().stop();
  EXPECT_TRUE(run.has_added_nothing());
}

INSTANTIATE_TEST_SUITE_P(All, LostManager, testing::Values(Act::compute, Act::block, Act::undefined_gradient),
                         [](const auto& act) {
                           return act.param == Act::compute ? "BetweenSteps"
                                  : act.param == Act::block ? "InAStep"
                                                            : "AfterAnAbortedStep";
                         });

pid_t only_child_of(pid_t pid) {
  std::vector<pid_t> pids;
  for (const auto& task : std::filesystem::directory_iterator(fmt::format("/proc/{}/task", pid))) {
    std::ifstream file(task.path() / "children");
    pids.insert(pids.end(), std::istream_iterator<pid_t>(file), {});
  }
  EXPECT_EQ(pids.size(), 1u);
  return pids.at(0);
}

/// The role of a host on the stage of arguments[0], with the start method of arguments[3]. It says the pids
/// of manager and runners. If arguments[1] is "forks" it also forks a child and says its pid. If arguments[2]
/// is "steps" it makes a step. Then it waits for the test.
constexpr const char* hosts = "hosts";

StartMethod method_of(const std::string& name) {
  for (const auto method : {StartMethod::fork, StartMethod::forkserver})
    if (name == config::name_of(method)) return method;
  return StartMethod::spawn;
}

const RegisteredRole host_role(hosts, [](const Arguments& arguments, int argc, char** argv) {
  init(argc, argv);
  auto config = staged_config(arguments.at(0));
  config.data.options["fork_at"] = "0";
  client::Handle manager(config, {.method = method_of(arguments.at(3))});
  const auto statistics = manager.statistics();
  std::string pids = fmt::format("{}", statistics.manager_pid);
  for (const auto& runner : statistics.runners) pids += fmt::format(" {}", runner.pid);
  if (arguments.at(1) == "forks") {
    const auto child = fork();
    if (child == 0) {
      wait_for_test();
      _exit(0);
    }
    pids += fmt::format(" {}", child);
  }
  say(pids);
  if (arguments.at(2) == "steps") manager.step();
  wait_for_test();
  return 0;
});

/// A host in a process of its own.
class Host {
 public:
  /// A host whose start does not return.
  Host(const Stage& stage, StartMethod method) : Host(stage, "alone", "idles", method) {}
  Host(const Stage& stage, const std::string& forks, const std::string& steps)
      : Host(stage, forks, steps, StartMethod::spawn) {
    read_pids(forks == "forks");
  }

  void kill_and_wait() { role_.kill_and_wait(); }
  const Processes& processes() const { return processes_; }
  /// The child that the host forked.
  int child() const { return child_.get(); }
  /// Ends the child that the host forked.
  void let_go() { role_.let_go(); }

 private:
  Host(const Stage& stage, const std::string& forks, const std::string& steps, StartMethod method)
      : role_(hosts, {stage.path(), forks, steps, config::name_of(method)}) {}

  void read_pids(bool forks) {
    const auto line = role_.line();
    ASSERT_NE(line, "") << "the host ended before it had a manager";
    std::istringstream words(line);
    std::vector<pid_t> pids{std::istream_iterator<pid_t>(words), {}};
    if (forks) {
      child_ = ipc::open_pidfd(pids.back());
      pids.pop_back();
    }
    processes_ = processes_of(pids.at(0), {pids.begin() + 1, pids.end()});
  }

  RoleProcess role_;
  Processes processes_;
  base::UniqueFd child_;
};

/// Whether it has forked a child, and whether its runners hang in the model. The child holds the host's end
/// of the socket, so the socket does not close when the host ends.
class LostHost : public testing::TestWithParam<std::pair<bool, bool>> {};

TEST_P(LostHost, TakesAllWithIt) {
  const auto [forks, hangs] = GetParam();
  Stage stage;
  if (hangs) stage.tell(1, Act::block);
  Host host(stage, forks ? "forks" : "alone", hangs ? "steps" : "idles");
  if (hangs) stage.wait_until_blocked(1);
  host.kill_and_wait();
  expect_ended(host.processes());
  if (forks) {
    EXPECT_FALSE(ipc::has_ended(host.child()));
    host.let_go();
    EXPECT_TRUE(ipc::wait_ended(host.child(), soon()));
  }
  expect_nothing_left();
}

INSTANTIATE_TEST_SUITE_P(All, LostHost,
                         testing::Values(std::pair(false, false), std::pair(true, false),
                                         std::pair(false, true)),
                         [](const auto& info) {
                           return info.param.first    ? "WhileAChildThatItForkedLives"
                                  : info.param.second ? "WhileARunnerHangsInTheModel"
                                                      : "Alone";
                         });

class LostHostThatStarts : public testing::TestWithParam<StartMethod> {};

// The factory waits for something that never comes.
TEST_P(LostHostThatStarts, TakesAManagerWithItThatIsInsideAFactory) {
  Stage stage;
  stage.hold_factories();
  Host host(stage, GetParam());
  const auto pid = stage.wait_until_in_factory();
  const auto manager = ipc::open_pidfd(pid);
  const auto fork_server = ipc::open_pidfd(only_child_of(pid));
  host.kill_and_wait();
  EXPECT_TRUE(ipc::wait_ended(manager.get(), soon()));
  EXPECT_TRUE(ipc::wait_ended(fork_server.get(), soon()));
  stage.release_factories();
  expect_nothing_left();
}

INSTANTIATE_TEST_SUITE_P(All, LostHostThatStarts,
                         testing::Values(StartMethod::spawn, StartMethod::fork, StartMethod::forkserver),
                         [](const auto& method) { return config::name_of(method.param); });

// The child holds the manager's end of the socket, so the socket does not close when the manager ends.
TEST(LostManagerThatStarts, IsToldAtOnceWhileAChildThatItForkedLives) {
  Stage stage;
  stage.hold_factories();
  auto config = staged_config(stage);
  config.model.options["forks_in_factory"] = "1";
  config.start_timeout = 30;
  auto start = std::async(std::launch::async, [&] {
    return message_of<SessionError>([&] { const client::Handle manager(config, {}); });
  });
  const auto child = ipc::open_pidfd(stage.child_of_model());
  const auto manager = ipc::open_pidfd(stage.wait_until_in_factory());
  ipc::send_signal(manager.get(), SIGKILL);
  expect_contains(start.get(), {"the manager process", "killed by signal 9 (KILL)"});
  ipc::send_signal(child.get(), SIGKILL);
  expect_nothing_left();
}

/// Children that user code has forked in a runner and in the manager.
class ForkedChildren {
 public:
  explicit ForkedChildren(Stage& stage)
      : of_runner_(ipc::open_pidfd(stage.child_of_model())),
        of_manager_(ipc::open_pidfd(stage.child_of_source())) {}
  void expect_runners_ended() const { EXPECT_TRUE(ipc::wait_ended(of_runner_.get(), soon())); }
  void expect_ended() const {
    expect_runners_ended();
    EXPECT_TRUE(ipc::wait_ended(of_manager_.get(), soon()));
  }
  void terminate_that_of_manager() const {
    ipc::send_signal(of_manager_.get(), SIGTERM);
    EXPECT_TRUE(ipc::wait_ended(of_manager_.get(), soon()));
  }
  bool manager_has_its() const { return !ipc::has_ended(of_manager_.get()); }

 private:
  base::UniqueFd of_runner_, of_manager_;
};

/// A run with a forked child in runner 1 and one in the manager.
class ForkedChildrenTest : public testing::Test {
 protected:
  ForkedChildrenTest() {
    auto config = staged_config(stage_);
    config.data.options["fork_at"] = "0";
    stage_.tell_once(1, Act::fork_child);
    run_.emplace(config);
    expect_ok(run_->manager());
  }

  Stage stage_;
  std::optional<StagedRun> run_;
};

TEST_F(ForkedChildrenTest, HaveNothingOfTheSession) {
  for (const pid_t child : {stage_.child_of_model(), stage_.child_of_source()}) {
    std::ifstream maps(fmt::format("/proc/{}/maps", child));
    int lines = 0;
    for (std::string line; std::getline(maps, line); ++lines)
      EXPECT_EQ(line.find("/memfd:accelmgr"), std::string::npos) << line;
    EXPECT_GT(lines, 0);
  }
}

TEST_F(ForkedChildrenTest, EndWithASignalToThemAlone) {
  const ForkedChildren children(stage_);
  children.terminate_that_of_manager();
  expect_ok(run_->manager());
}

void kill_runner(StagedRun& run) { run.kill_and_wait(run.runner(1)); }
void kill_fork_server(StagedRun& run) { run.kill_and_wait(run.processes().fork_server.get()); }
void kill_manager(StagedRun& run) { run.kill_and_wait(run.processes().manager.get()); }
void stop(StagedRun& run) { run.manager().stop(); }
void kill_all(StagedRun& run) { run.manager().kill(); }

/// What ends runner 1, and then the manager.
struct Ends {
  const char* name;
  void (*first)(StagedRun& run);
  void (*second)(StagedRun& run);
};
class ForkedChildrenEnd : public ForkedChildrenTest, public testing::WithParamInterface<Ends> {};

TEST_P(ForkedChildrenEnd, WithTheirProcess) {
  const ForkedChildren children(stage_);
  GetParam().first(*run_);
  children.expect_runners_ended();
  EXPECT_TRUE(children.manager_has_its());
  GetParam().second(*run_);
  children.expect_ended();
}

INSTANTIATE_TEST_SUITE_P(All, ForkedChildrenEnd,
                         testing::Values(Ends{"Killed", kill_runner, kill_manager},
                                         Ends{"Stopped", kill_fork_server, stop},
                                         Ends{"AllKilled", kill_runner, kill_all}),
                         [](const auto& info) { return info.param.name; });

TEST(ForkedChildrenOfAHost, EndWithIt) {
  Stage stage;
  stage.tell_once(1, Act::fork_child);
  Host host(stage, "alone", "steps");
  const ForkedChildren children(stage);
  host.kill_and_wait();
  children.expect_ended();
  expect_ended(host.processes());
  expect_nothing_left();
}

}  // namespace
}  // namespace accelmgr::test
