// Checks that after the death of any process the step says so and does not count, and that nothing is left.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>

#include "base/config/start_method.hpp"
#include "base/ipc/process.hpp"
#include "roles.hpp"
#include "staged_run.hpp"
#include "support.hpp"

namespace accelmgr::test {
namespace {

/// Prints the time since `begin_ns` and records it with the test result. The limit is far above the promised
/// time, because the machine may be busy.
void report_ms(const std::string& what, std::int64_t begin_ns) {
  const double ms = double(base::now_ns() - begin_ns) / 1e6;
  std::printf("%s: %.1f ms\n", what.c_str(), ms);
  testing::Test::RecordProperty(what, fmt::format("{:.1f} ms", ms));
  EXPECT_LT(ms, 30'000) << what;
}

TEST(LostRunner, KilledWhileItComputesEndsTheStep) {
  Stage stage;
  RunAfterOneStep run(stage);
  stage.tell(1, Act::block);
  auto step = run.step_in_background();
  stage.wait_until_blocked(1);
  const auto dead_ns = run.kill_and_wait(run.runner(1));
  const auto result = step.get();
  report_ms("from the runner's end to that of the step", dead_ns);
  expect_failed(result, StepStatus::runner_lost,
                {"runner 1", "killed by signal 9 (KILL)", "phase forward", "attempt 2"});
  EXPECT_EQ(result.rank, 1);
  EXPECT_EQ(result.step, 1u);
  EXPECT_TRUE(run.has_added_nothing());

  expect_failed(run.manager().step(), StepStatus::runner_lost, {"runner 1", "killed by signal 9 (KILL)"});
  EXPECT_TRUE(run.has_added_nothing());
}

TEST(LostRunner, AnExceptionOfTheModelArrives) {
  Stage stage;
  RunAfterOneStep run(stage);
  stage.tell(1, Act::throw_exception);
  const auto result = run.manager().step();
  expect_failed(result, StepStatus::runner_lost, {"runner 1", "phase forward", "the stage collapsed"});
  EXPECT_EQ(result.rank, 1);
  EXPECT_TRUE(run.has_added_nothing());
  EXPECT_TRUE(ipc::wait_ended(run.runner(1), soon()));
  expect_failed(run.manager().step(), StepStatus::runner_lost, {"exit code 17", "the stage collapsed"});
}

TEST(LostForkServer, TakesTheRunnersWithIt) {
  Stage stage;
  RunAfterOneStep run(stage);
  stage.tell(0, Act::block);
  stage.tell(1, Act::block);
  auto step = run.step_in_background();
  stage.wait_until_blocked(0);
  stage.wait_until_blocked(1);
  const auto dead_ns = run.kill_and_wait(run.processes().fork_server.get());
  const auto result = step.get();
  report_ms("from the fork server's end to that of the step", dead_ns);
  expect_failed(result, StepStatus::runner_lost,
                {"the fork server (pid", "killed by signal 9 (KILL)", "all runners with it"});
  EXPECT_TRUE(run.has_added_nothing());
}

void expect_children_ended_of_killed_manager(const StagedRun& run, std::int64_t dead_ns) {
  expect_ended(run.processes());
  report_ms("from the manager's end to that of fork server and runners", dead_ns);
}

void expect_readable_after_lost_manager(RunAfterOneStep& run) {
  EXPECT_TRUE(run.has_added_nothing());
  expect_failed(run.manager().step(), StepStatus::manager_lost, {"manager", "killed by signal 9 (KILL)"});
  run.manager().stop();
  EXPECT_TRUE(run.has_added_nothing());
}

TEST(LostManager, KilledInAStepLeavesTheGradientsReadable) {
  Stage stage;
  RunAfterOneStep run(stage);
  stage.tell(1, Act::block);
  auto step = run.step_in_background();
  stage.wait_until_blocked(1);
  const auto dead_ns = run.kill_and_wait(run.processes().manager.get());
  expect_failed(step.get(), StepStatus::manager_lost, {"manager", "killed by signal 9 (KILL)"});
  expect_children_ended_of_killed_manager(run, dead_ns);
  expect_readable_after_lost_manager(run);
}

TEST(LostManager, KilledBetweenStepsLeavesTheGradientsReadable) {
  Stage stage;
  RunAfterOneStep run(stage);
  const auto dead_ns = run.kill_and_wait(run.processes().manager.get());
  expect_children_ended_of_killed_manager(run, dead_ns);
  expect_readable_after_lost_manager(run);
}

// An aborted attempt leaves gradients in the slabs. A recovery after the manager's death must not add them to
// the master.
TEST(LostManager, KilledAfterAnAbortedStepAddsNothingOfIt) {
  Stage stage;
  RunAfterOneStep run(stage);
  stage.tell(1, Act::undefined_gradient);
  EXPECT_EQ(run.manager().step().status, StepStatus::nonfinite);
  run.kill_and_wait(run.processes().manager.get());
  expect_readable_after_lost_manager(run);
}

pid_t only_child_of(pid_t pid) {
  std::vector<pid_t> pids;
  for (const auto& task : std::filesystem::directory_iterator(fmt::format("/proc/{}/task", pid))) {
    std::ifstream file(task.path() / "children");
    pids.insert(pids.end(), std::istream_iterator<pid_t>(file), {});
  }
  EXPECT_EQ(pids.size(), 1u);
  return pids.at(0);
}

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

TEST(LostHost, TakesAllWithIt) {
  const Stage stage;
  Host host(stage, "alone", "idles");
  host.kill_and_wait();
  const auto dead_ns = base::now_ns();
  expect_ended(host.processes());
  report_ms("from the host's end to that of all", dead_ns);
  expect_nothing_left();
}

// The child holds the host's end of the socket, so the socket does not close when the host ends.
TEST(LostHost, TakesAllWithItWhileAChildThatItForkedLives) {
  const Stage stage;
  Host host(stage, "forks", "idles");
  host.kill_and_wait();
  const auto dead_ns = base::now_ns();
  expect_ended(host.processes());
  report_ms("from the host's end to that of all", dead_ns);
  EXPECT_FALSE(ipc::has_ended(host.child()));
  host.let_go();
  EXPECT_TRUE(ipc::wait_ended(host.child(), soon()));
  expect_nothing_left();
}

TEST(LostHost, TakesRunnersWithItThatHangInTheModel) {
  Stage stage;
  stage.tell(1, Act::block);
  Host host(stage, "alone", "steps");
  stage.wait_until_blocked(1);
  host.kill_and_wait();
  expect_ended(host.processes());
  expect_nothing_left();
}

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
  const auto dead_ns = base::now_ns();
  EXPECT_TRUE(ipc::wait_ended(manager.get(), soon()));
  EXPECT_TRUE(ipc::wait_ended(fork_server.get(), soon()));
  report_ms("from the host's end to that of manager and fork server", dead_ns);
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

TEST_F(ForkedChildrenTest, EndWithTheirRunner) {
  const ForkedChildren children(stage_);
  run_->kill_and_wait(run_->runner(1));
  children.expect_runners_ended();
  EXPECT_TRUE(children.manager_has_its());
}

TEST_F(ForkedChildrenTest, EndWithTheirRunnerWhereTheForkServerIsKilled) {
  const ForkedChildren children(stage_);
  run_->kill_and_wait(run_->processes().fork_server.get());
  children.expect_runners_ended();
  EXPECT_TRUE(children.manager_has_its());
}

TEST_F(ForkedChildrenTest, EndWithTheManagerThatIsKilled) {
  const ForkedChildren children(stage_);
  run_->kill_and_wait(run_->processes().manager.get());
  children.expect_ended();
}

TEST_F(ForkedChildrenTest, EndWithTheManagerThatStops) {
  const ForkedChildren children(stage_);
  run_->manager().stop();
  children.expect_ended();
}

TEST_F(ForkedChildrenTest, EndWhenAllIsKilledAtOnce) {
  const ForkedChildren children(stage_);
  run_->manager().kill();
  children.expect_ended();
}

TEST(ForkedChildrenOfAHost, EndWithIt) {
  Stage stage;
  stage.tell_once(1, Act::fork_child);
  Host host(stage, "alone", "steps");
  const ForkedChildren children(stage);
  host.kill_and_wait();
  const auto dead_ns = base::now_ns();
  children.expect_ended();
  report_ms("from the host's end to that of what was forked", dead_ns);
  expect_ended(host.processes());
  expect_nothing_left();
}

}  // namespace
}  // namespace accelmgr::test
