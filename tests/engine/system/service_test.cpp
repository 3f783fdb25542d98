// Checks that a service outlives its hosts: they attach one after the other, end at any instant, and nothing
// is lost, doubled or left hanging.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <fstream>
#include <future>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>
#include <tuple>

#include "descriptors.hpp"
#include "engine/client/service_socket.hpp"
#include "engine/protocol/messages.hpp"
#include "service_run.hpp"

namespace accelmgr::test {
namespace {

TEST(Service, TheNextHostGoesOnWhereTheLastOneDetached) {
  const auto expected = undisturbed(4);
  const ServiceRun service;
  for (int host = 0; host < 4; ++host) {
    auto manager = service.attach();
    expect_ok(manager);
    manager.stop();
  }
  auto manager = service.attach();
  EXPECT_TRUE(same_bits(gradients_of(manager), expected.gradients));
  EXPECT_TRUE(same_bits(buffers_of(manager), expected.buffers));
  EXPECT_EQ(manager.statistics().elements, expected.elements);
  EXPECT_EQ(service.status()["host"]["lease"], 5);
}

TEST(Service, AHostThatHasDetachedKeepsACopyAndChangesNothing) {
  const ServiceRun service;
  auto first = service.attach();
  expect_ok(first);
  const auto gradients = gradients_of(first);
  first.stop();
  EXPECT_TRUE(same_bits(gradients_of(first), gradients));
  first.zero_grad();
  auto second = service.attach();
  EXPECT_TRUE(same_bits(gradients_of(second), gradients));
  EXPECT_FALSE(same_bits(gradients_of(first), gradients));
  EXPECT_THROW(first.step(), UsageError);
}

TEST(Service, ASecondHostAndARequestForAStepAreRefusedWithTheNameOfTheFirst) {
  const ServiceRun service;
  auto manager = service.attach();
  expect_contains(message_of<SessionError>([&] { service.attach(); }), {"test (pid", "drives the session"});
  const auto answer = service.ask("POST", "/v1/step");
  EXPECT_EQ(answer.status, 409);
  EXPECT_EQ(answer.code(), "host_drives");
  EXPECT_EQ(manager.statistics().steps, 0u);
  expect_ok(manager);
}

TEST(Service, WhatItsDataSourceExecutesInheritsNoDescriptorOfOurs) {
  Stage stage;
  auto config = restarting(stage);
  config.data.options["execute_at"] = "40";
  const ServiceRun service(config);
  auto connection = client::ServiceSocket::connect(service.socket(), soon());
  EXPECT_EQ(connection.ask("GET", "/v1/status", "", "", soon()).status, 200);  // It stays open.
  auto manager = service.attach();
  for (int i = 0; i < 5; ++i) expect_ok(manager);
  auto inherited = inherited_by(stage.child_of_source());
  for (const int of_role : {role_says, role_waits}) inherited.erase(of_role);
  EXPECT_EQ(inherited, standard_streams(inherited));
}

/// What its data source does, and the signal that ends it.
class EndedService : public testing::TestWithParam<std::tuple<const char*, int>> {};

TEST_P(EndedService, LeavesNothingThatItsDataSourceHasBegun) {
  const auto& [begins, signal] = GetParam();
  Stage stage;
  auto config = restarting(stage);
  config.data.options[begins] = "0";
  ServiceRun service(config);
  const auto child = ipc::open_pidfd(stage.child_of_source());
  if (signal == SIGTERM) {
    EXPECT_EQ(service.terminate(), 0);
    EXPECT_TRUE(ipc::has_ended(child.get()));
  } else {
    service.kill();
    EXPECT_TRUE(ipc::wait_ended(child.get(), soon()));
    std::filesystem::remove(service.socket());
  }
}

INSTANTIATE_TEST_SUITE_P(All, EndedService,
                         testing::Combine(testing::Values("fork_at", "execute_at"),
                                          testing::Values(SIGTERM, SIGKILL)));

TEST(Service, IsNotEndedByTheSignalThatEndsAWorkerOfItsDataSource) {
  Stage stage;
  auto config = restarting(stage);
  config.data.options["fork_at"] = "40";
  const ServiceRun service(config);
  auto manager = service.attach();
  for (int i = 0; i < 5; ++i) expect_ok(manager);
  const auto child = ipc::open_pidfd(stage.child_of_source());
  ipc::send_signal(child.get(), SIGTERM);
  EXPECT_TRUE(ipc::wait_ended(child.get(), soon()));
  for (int i = 0; i < 3; ++i) expect_ok(manager);
  EXPECT_TRUE(service.status()["ready"].get<bool>());
}

// A process that user code puts into a session of its own goes on.
TEST(Service, IsNotKeptOutByWhatAKilledOneLeftBehind) {
  Stage stage;
  const TemporaryFolder checkpoints;
  auto config = restarting(stage);
  config.model.options["forks_in_factory"] = "1";
  config.checkpoint.directory = checkpoints.path();
  ServiceRun service(config);
  const auto child = ipc::open_pidfd(stage.child_of_model());
  service.kill();
  EXPECT_FALSE(ipc::has_ended(child.get()));
  RoleProcess next(serves, {service.folder() / "config.yaml", service.socket()});
  EXPECT_TRUE(next.line().starts_with("ready: model"));
  EXPECT_FALSE(ipc::has_ended(child.get()));
  ipc::send_signal(next.pidfd(), SIGTERM);
  EXPECT_EQ(next.status(), 0);
  ipc::send_signal(child.get(), SIGKILL);
}

TEST(Service, AHostThatExecutesAnotherProgramMayAttachAgain) {
  const ServiceRun service;
  AttachedHost host(service, {"step", "again"});
  for (const auto* expected : {"", "ok", "", "ok"}) EXPECT_EQ(host.line(), expected);
  EXPECT_EQ(service.status()["steps"], 2);
  host.let_go();
  EXPECT_EQ(host.status(), 0);
}

TEST(Service, AHostWithoutDescriptorsKeepsNobodyOut) {
  const ServiceRun service;
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const base::UniqueFd next(dup(0));
  const rlimit low{.rlim_cur = static_cast<rlim_t>(next.get()) + 8, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  const auto text = message_of<SessionError>([&] { service.attach(); });
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_NE(text.find("descriptors"), std::string::npos) << text;
  auto manager = service.attach();
  expect_ok(manager);
}

// It closes its socket and lives on, so that it may still write to the session.
TEST(Service, AHostThatIsEndingIsTheReasonWhyAnotherIsNotAdmitted) {
  const ServiceRun service;
  {
    auto socket = client::ServiceSocket::connect(service.socket(), soon());
    const auto head =
        fmt::format("Upgrade: accelmgr-host\r\nAccelmgr-Build: {:016x}\r\n", protocol::build_fingerprint());
    EXPECT_EQ(socket.ask("GET", "/v1/attach", head, "", soon()).status, 101);
  }
  while (!service.status()["host"]["leaving"].get<bool>()) std::this_thread::yield();
  AttachedHost other(service, {"at once"});
  EXPECT_NE(other.line().find("is ending"), std::string::npos);
  EXPECT_EQ(other.status(), 0);
  auto manager = service.attach();  // The process that is ending itself.
  expect_ok(manager);
}

TEST(Service, AHostThatDiesWhileItWritesParametersIsReported) {
  const ServiceRun service;
  AttachedHost host(service, {"step", "write"});
  for (const auto* expected : {"", "ok", "write"}) EXPECT_EQ(host.line(), expected);
  host.kill_and_wait();
  {
    auto manager = service.attach();
    EXPECT_NE(manager.unfinished().find("test"), std::string::npos) << manager.unfinished();
    EXPECT_NE(manager.unfinished().find("ended while it wrote parameters"), std::string::npos);
    expect_ok(manager);  // That writes none.
  }
  {
    auto manager = service.attach();
    EXPECT_NE(manager.unfinished(), "") << "the host before has not written them either";
    manager.begin_writing();
    manager.end_writing(/*whole=*/false);
  }
  {
    auto manager = service.attach();
    EXPECT_NE(manager.unfinished(), "") << "what the host before has written is not whole";
    write_parameters(manager, parameters_of(manager));
    expect_ok(manager);
  }
  EXPECT_EQ(service.attach().unfinished(), "");
}

TEST(Service, WithASnapshotTheNextHostGoesBackToTheLastWholeParameters) {
  const ServiceRun service([](Config& config) { config.parameters.snapshot = true; });
  Tensors whole;
  {
    auto manager = service.attach();
    EXPECT_THROW(manager.revert_parameters(), UsageError) << "nothing is half written";
    whole = parameters_of(manager);
    for (auto& tensor : whole) tensor.bytes[0] ^= std::byte{1};
    write_parameters(manager, whole);
  }
  for (int i = 0; i < 2; ++i) {  // The second one writes on top of what is half written.
    AttachedHost host(service, {"step", "tear"});
    EXPECT_EQ(host.line().empty(), i == 0);
    for (const auto* expected : {"ok", "tear"}) EXPECT_EQ(host.line(), expected);
    host.kill_and_wait();
  }
  {
    auto manager = service.attach();
    EXPECT_NE(manager.unfinished(), "");
    EXPECT_FALSE(same_bits(parameters_of(manager), whole));
    manager.revert_parameters();
    EXPECT_TRUE(same_bits(parameters_of(manager), whole));
    EXPECT_EQ(manager.left_gradients(), LeftGradients::unapplied);
    EXPECT_THROW(manager.revert_parameters(), UsageError);
    expect_ok(manager);
  }
  EXPECT_EQ(service.attach().unfinished(), "");
}

TEST(Service, MakesNoStepItselfWithHalfWrittenParameters) {
  const ServiceRun service;
  AttachedHost host(service, {"write"});
  for (const auto* expected : {"", "write"}) EXPECT_EQ(host.line(), expected);
  host.kill_and_wait();
  service.wait_until_alone();
  const auto answer = service.ask("POST", "/v1/step");
  EXPECT_EQ(answer.status, 409);
  EXPECT_EQ(answer.code(), "unfinished");
}

/// What a host does before it is killed, and what the next one finds.
struct Left {
  std::vector<std::string> deeds;
  LeftGradients found;
  friend void PrintTo(const Left& left, std::ostream* out) { *out << left.deeds.back(); }
};

class LeftByAHost : public testing::TestWithParam<Left> {};

/// Returns the gradients of the second step alone: the host zeroes those of the first one.
Tensors second_gradients() {
  const ServiceRun service;
  auto host = service.attach();
  expect_ok(host);
  host.zero_grad();
  expect_ok(host);
  return gradients_of(host);
}

TEST_P(LeftByAHost, GradientsAreToldOfAndNotAddedTo) {
  const auto expected = second_gradients();
  const ServiceRun service;
  const auto& [deeds, found] = GetParam();
  AttachedHost host(service, deeds);
  EXPECT_EQ(host.line(), "");
  for (std::size_t i = 0; i < deeds.size(); ++i) EXPECT_NE(host.line(), "");
  host.kill_and_wait();
  {
    const auto manager = service.attach();
    EXPECT_EQ(manager.left_gradients(), found);
  }
  auto manager = service.attach(/*keep_gradients=*/false);
  EXPECT_EQ(manager.left_gradients(), found) << "until a host has made a step, or zeroed them";
  expect_ok(manager);
  EXPECT_TRUE(same_bits(gradients_of(manager), expected));
  const auto once = gradients_of(manager);
  expect_ok(manager);
  EXPECT_FALSE(same_bits(gradients_of(manager), once));
  EXPECT_EQ(manager.statistics().steps, 3u);
}

INSTANTIATE_TEST_SUITE_P(Deeds, LeftByAHost,
                         testing::Values(Left{{"step"}, LeftGradients::unapplied},
                                         Left{{"step", "update"}, LeftGradients::applied},
                                         Left{{"step", "write"}, LeftGradients::applied},
                                         Left{{"step", "zero"}, LeftGradients::none},
                                         Left{{"step", "update", "zero"}, LeftGradients::none}));

/// Where a host is killed: while a runner is stopped in a phase of its second step.
class HostKilled : public testing::TestWithParam<const char*> {};

TEST_P(HostKilled, NothingIsLostOrDoubled) {
  const auto expected = undisturbed(4);
  const ServiceRun service(
      [&](Config& config) { config.faults = {std::string("rank=1 step=2 fault=stop phase=") + GetParam()}; });
  AttachedHost host(service, {"step", "step"});
  EXPECT_EQ(host.line(), "");
  EXPECT_EQ(host.line(), "ok");
  service.wait_until_stopped(1);
  host.kill_and_wait();
  ipc::send_signal(service.runner(1), SIGCONT);
  auto manager = service.attach();
  EXPECT_EQ(manager.unfinished(), "");
  while (manager.statistics().steps < 4) expect_ok(manager);
  EXPECT_TRUE(same_bits(gradients_of(manager), expected.gradients));
  EXPECT_TRUE(same_bits(buffers_of(manager), expected.buffers));
  EXPECT_EQ(manager.statistics().elements, expected.elements);
  EXPECT_EQ(manager.statistics().samples, expected.samples);
}

INSTANTIATE_TEST_SUITE_P(InPhase, HostKilled,
                         testing::Values("load_parameters", "data", "forward", "backward", "gradient_capture",
                                         "vote", "voted", "undo_saved", "in_flight", "reduced", "chunk",
                                         "publish", "published", "close"),
                         [](const auto& info) { return std::string(info.param); });

/// Stops the service and its runners while they reduce the second step, so that all are in a committed
/// attempt.
class PausedService : public testing::Test {
 protected:
  static Config config(const Stage& stage) {
    auto config = restarting(stage);
    config.runners.reduction_timeout = 5;
    config.faults = {"rank=1 step=2 fault=stop phase=in_flight"};
    return config;
  }
  void pause(const ServiceRun& service) const {
    service.wait_until_stopped(1);
    for (const int pidfd : all(service)) ipc::send_signal(pidfd, SIGSTOP);
  }
  static std::vector<int> all(const ServiceRun& service) {
    return {service.pidfd(), service.processes().fork_server.get(), service.runner(0), service.runner(1)};
  }
};

TEST_F(PausedService, IsLeftByItsHostAndDoublesNothing) {
  const auto expected = undisturbed(3), committed = undisturbed(2);
  const Stage stage;
  const ServiceRun service(config(stage));
  {
    auto host = service.attach();
    expect_ok(host);
    auto step = std::async(std::launch::async,
                           [&] { return message_of<SessionError>([&] { host.step({.timeout_s = 1}); }); });
    pause(service);
    const auto text = step.get();
    EXPECT_NE(text.find("has stood still"), std::string::npos) << text;
    EXPECT_EQ(text.find(" for 0.0 s"), std::string::npos) << text;
    EXPECT_THROW(host.step(), UsageError) << "it has left";
  }
  EXPECT_FALSE(ipc::has_ended(service.pidfd())) << "a host ends no service";
  for (const int pidfd : all(service)) ipc::send_signal(pidfd, SIGCONT);
  auto next = service.attach();
  EXPECT_EQ(next.statistics().steps, 2u) << "the step was committed";
  EXPECT_TRUE(same_bits(gradients_of(next), committed.gradients));
  expect_ok(next);
  EXPECT_TRUE(same_bits(gradients_of(next), expected.gradients));
  EXPECT_EQ(next.statistics().losses, 0u);
}

TEST(Service, ItsLossIsThatOfTheManager) {
  ServiceRun service;
  auto manager = service.attach();
  expect_ok(manager);
  const auto gradients = gradients_of(manager);
  ipc::send_signal(service.pidfd(), SIGKILL);
  EXPECT_TRUE(ipc::wait_ended(service.pidfd(), soon()));
  expect_failed(manager.step(), StepStatus::manager_lost, {"the service has ended"});
  EXPECT_THROW(manager.recover(), UsageError);
  EXPECT_TRUE(same_bits(gradients_of(manager), gradients));
  manager.stop();
  EXPECT_TRUE(same_bits(gradients_of(manager), gradients));
  service.wait();
  std::filesystem::remove(service.socket());
}

// ---- Without a host ----

TEST(Service, MakesStepsItself) {
  const auto expected = undisturbed(3);
  const ServiceRun service;
  EXPECT_EQ(service.ask("POST", "/v1/step").body["steps"][0]["status"], "ok");
  const auto answer = service.ask("POST", "/v1/step", R"({"count": 2})");
  EXPECT_EQ(answer.status, 200);
  EXPECT_EQ(answer.body["steps"].size(), 2u);
  EXPECT_EQ(answer.body["steps"][1]["step"], 3);
  auto manager = service.attach();
  EXPECT_TRUE(same_bits(gradients_of(manager), expected.gradients));
}

TEST(Service, AFailedStepIsAnErrorWithItsRank) {
  Stage stage;
  const ServiceRun service(restarting(stage));
  stage.tell(1, Act::infinite_loss);
  const auto answer = service.ask("POST", "/v1/step");
  EXPECT_EQ(answer.status, 409);
  EXPECT_EQ(answer.code(), "nonfinite");
  EXPECT_EQ(answer.body["error"]["rank"], 1);
  EXPECT_EQ(answer.body["error"]["step"], 0);
}

TEST(Service, SaysWhetherAStepWouldBeServedAndEndsWhenItGivesUp) {
  const TemporaryFolder checkpoints;
  ServiceRun service([&](Config& config) {
    config.runners.max_restarts = 0;
    config.checkpoint.directory = checkpoints.path();
  });
  EXPECT_EQ(service.ask("GET", "/readyz").status, 200);
  auto manager = service.attach();  // The service waits until it leaves.
  expect_ok(manager);
  ipc::send_signal(service.runner(0), SIGKILL);
  while (service.ask("GET", "/readyz").status == 200) std::this_thread::yield();
  EXPECT_EQ(service.ask("GET", "/readyz").code(), "given_up");
  EXPECT_EQ(service.ask("GET", "/healthz").status, 200);
  const auto result = manager.step();
  EXPECT_EQ(result.status, StepStatus::runner_lost) << result.error;
  EXPECT_EQ(result.causes.size(), 1u);
  manager.stop();
  const int status = service.wait();
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 3) << status;
  EXPECT_TRUE(std::filesystem::exists(checkpoints / "step-00000001")) << "its last checkpoint";
}

/// How long the threads of a process have run so far, by their names, in nanoseconds.
std::map<std::string, std::int64_t> times_of_threads(pid_t pid) {
  std::map<std::string, std::int64_t> times;
  for (const auto& task : std::filesystem::directory_iterator(fmt::format("/proc/{}/task", pid))) {
    std::string name;
    std::int64_t ran_ns = 0;
    std::getline(std::ifstream(task.path() / "comm"), name);
    std::ifstream(task.path() / "schedstat") >> ran_ns;
    times[name] += ran_ns;
  }
  return times;
}

TEST(Service, ClientsTakeNoTimeOfTheSupervisor) {
  const ServiceRun service;
  const auto before = times_of_threads(service.pid());
  ASSERT_TRUE(before.contains("accelmgr:http"));
  for (int i = 0; i < 500; ++i)
    for (const auto* path : {"/v1/status", "/v1/steps", "/v1/trace", "/metrics"}) service.ask("GET", path);
  auto after = times_of_threads(service.pid());
  const auto spent = [&](const char* name) { return after[name] - before.at(name); };
  EXPECT_GT(spent("accelmgr:http"), 20'000'000);
  EXPECT_LT(spent("accelmgr:mgr"), spent("accelmgr:http") / 4);
}

// ---- Its end ----

TEST(Service, SigtermFinishesTheStepUnderWay) {
  Stage stage;
  ServiceRun service(restarting(stage));
  stage.tell(1, Act::block);
  AttachedHost host(service, {"step", "step"});
  EXPECT_EQ(host.line(), "");
  stage.wait_until_blocked(1);
  ipc::send_signal(service.pidfd(), SIGTERM);
  while (service.ask("GET", "/readyz").code() != "closing") std::this_thread::yield();
  // The 2 s that the host has to leave begin when the step ends.
  const auto uptime_s = [&] {  // A service refuses those who ask too often.
    auto answer = service.ask("GET", "/v1/status");
    while (answer.status != 200) answer = service.ask("GET", "/v1/status");
    return answer.body["uptime_s"].get<double>();
  };
  const auto begun = uptime_s();
  while (uptime_s() < begun + 2.5) std::this_thread::yield();
  stage.tell(1, Act::compute);
  EXPECT_EQ(host.line(), "ok");
  EXPECT_EQ(host.line(), "the service is being stopped and makes no more steps");
  host.let_go();
  EXPECT_EQ(host.status(), 0);
  EXPECT_EQ(service.terminate(), 0);
}

}  // namespace
}  // namespace accelmgr::test
