// Checks what clients may change in a service while it runs: its team, single runners, its checkpoints. A
// host may drive the session meanwhile; nothing is lost or doubled.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "service_run.hpp"

namespace accelmgr::test {
namespace {

using nlohmann::json;

std::vector<int> pids_of(const json& status) {
  std::vector<int> pids;
  for (const auto& runner : status["runners"]) pids.push_back(runner["pid"].get<int>());
  return pids;
}

int participants_of(const Answer& answer) { return answer.body["steps"][0]["participants"].get<int>(); }

Config with_room_for_three(const Stage& stage) {
  auto config = restarting(stage);
  config.runners.max_runners = 3;
  return config;
}

// ---- What is refused ----

TEST(ServiceRequests, ThatCannotBeServedAreRefusedAndChangeNothing) {
  const Stage stage;
  const TemporaryFolder folder;
  auto config = with_room_for_three(stage);
  config.checkpoint.directory = folder / "checkpoints";
  const ServiceRun service(config);
  const auto expect_bad = [&](const char* method, const std::string& target, const std::string& body = "") {
    const auto answer = service.ask(method, target, body);
    EXPECT_EQ(answer.status, 400) << target << ' ' << body;
    EXPECT_EQ(answer.code(), "bad_request") << target << ' ' << body;
  };
  for (const auto* body :
       {"{", "[]", R"({"steps": 1})", R"({"count": 0})", R"({"count": "1"})", R"({"timeout_s": -1})",
        R"({"count": 1001})", R"({"count": 100001, "wait": false})"})
    expect_bad("POST", "/v1/step", body);
  for (const auto* body :
       {"", "{}", R"({"runners": 0})", R"({"runners": 4})", R"({"runners": "2"})", R"({"ranks": 2})"})
    expect_bad("POST", "/v1/resize", body);
  for (const auto* query : {"", "?rank=24", "?rank=-1", "?rank=x", "?rang=1"})
    expect_bad("POST", std::string("/v1/restart") + query);
  for (const auto* query : {"?rank=2", "?rank=23"})  // They are not in the team.
    EXPECT_EQ(service.ask("POST", std::string("/v1/restart") + query).code(), "refused") << query;
  // Clients choose no path.
  for (const auto* body : {R"({"name": "../../x"})", R"({"path": "/tmp/x"})", R"({"directory": ".."})"})
    expect_bad("POST", "/v1/checkpoint", body);
  EXPECT_FALSE(std::filesystem::exists(folder / "x"));
  for (const auto* query : {"?since=-1", "?since=x", "?since", "?limit=0", "?limit=257", "?last=1"})
    expect_bad("GET", std::string("/v1/steps") + query);
  for (const auto* query : {"?limit=1", "?since=1.x"}) expect_bad("GET", std::string("/v1/events") + query);
  // There are seven threads: three runners, host, supervisor, loader and checkpoint writer.
  for (const auto* query :
       {"?since=", "?since=x", "?since=1", "?since=1.2.3", "?since=0.0.0.0.0.0.", "?since=0.0.0.0.0.0.-1",
        "?since=0.0.0.0.0.0", "?since=0.0.0.0.0.0.0.0", "?last=1"})
    expect_bad("GET", std::string("/v1/trace") + query);
  EXPECT_EQ(service.ask("GET", "/v1/trace?since=1.2").body["error"]["message"],
            "since is '1.2'; it must be 'now', or the 'next' of an answer");
  EXPECT_EQ(service.ask("GET", "/v1/nothing").code(), "unknown_request");
  EXPECT_EQ(service.ask("DELETE", "/v1/stop").code(), "wrong_method");
  EXPECT_EQ(service.ask("GET", "/v1/step").status, 405);
  EXPECT_EQ(service.ask("POST", "/v1/step", std::string(64 * 1024 + 1, ' ')).code(), "body_too_large");
  EXPECT_EQ(service.ask("GET", "/healthz", "", "X: " + std::string(8 * 1024, 'x') + "\r\n").code(),
            "header_too_large");
  for (const auto& [target, protocol] : {std::pair{"/v1/attach", "host"}, {"/v1/observe", "observer"}}) {
    const auto upgrade = fmt::format("Upgrade: accelmgr-{}\r\n", protocol);
    EXPECT_EQ(service.ask("GET", target).code(), "upgrade_required");
    EXPECT_EQ(service.ask("GET", target, "", upgrade + "Accelmgr-Build: 1\r\n").code(), "foreign_build");
  }
  EXPECT_EQ(service.ask("GET", "/v1/observe", "", "Upgrade: accelmgr-host\r\n").code(), "upgrade_required");
  EXPECT_EQ(service.ask("POST", "/v1/cancel").status, 200);
  EXPECT_EQ(service.ask("GET", "/v1/pending").body["count"], 0);
  EXPECT_EQ(service.ask("GET", "/healthz").status, 200);
  EXPECT_EQ(service.status()["steps"], 0);
  EXPECT_EQ(service.status()["replacements"], 0);
  EXPECT_EQ(participants_of(service.ask("POST", "/v1/step")), 2);
}

// ---- Steps for which nobody waits ----

TEST(ServicePending, StepsGoOnWithoutAHostAndKeepTheNextOneWaiting) {
  const ServiceRun service;
  const auto begun = service.ask("POST", "/v1/step", R"({"count": 100000, "wait": false})");
  EXPECT_EQ(begun.body["pending"], 100'000);
  EXPECT_EQ(service.ask("POST", "/v1/step").code(), "steps_under_way");
  EXPECT_EQ(service.ask("POST", "/v1/zero_grad").code(), "steps_under_way");
  auto host = service.attach();
  EXPECT_EQ(host.found_steps(), 100'000);
  EXPECT_THROW(host.step(), UsageError);
  const auto over = service.ask("POST", "/v1/cancel").body;
  EXPECT_EQ(over["under_way"], false);
  const auto made = over["made"].get<std::size_t>();
  EXPECT_EQ(host.statistics().steps, made);
  for (std::size_t told = 0; told < made;) {
    const auto pending = service.ask("GET", "/v1/pending?since=" + std::to_string(told)).body;
    ASSERT_FALSE(pending["steps"].empty());
    for (const auto& step : pending["steps"]) EXPECT_EQ(step["step"], ++told);
  }
  EXPECT_EQ(host.step().status, StepStatus::ok);
  EXPECT_EQ(host.service_steps(0).under_way, false);
}

// ---- Resize ----

TEST(ServiceResize, AppliesToTheStepsOfAHost) {
  const Stage stage;
  const ServiceRun service(with_room_for_three(stage));
  auto manager = service.attach();
  for (const int runners : {3, 1}) {
    EXPECT_EQ(service.ask("POST", "/v1/resize", json{{"runners", runners}}.dump()).status, 200);
    const auto result = manager.step();
    EXPECT_EQ(result.status, StepStatus::ok) << result.error;
    EXPECT_EQ(result.participants, static_cast<std::uint32_t>(runners));
  }
}

// The runner that goes has not given its gradients: the step is made by the rest, from the same elements.
TEST(ServiceResize, DuringAStepLosesNothing) {
  Stage stage;
  const ServiceRun service(restarting(stage));
  stage.tell(1, Act::block);
  std::jthread stepping([&] { EXPECT_EQ(participants_of(service.ask("POST", "/v1/step")), 1); });
  stage.wait_until_blocked(1);
  EXPECT_EQ(service.ask("POST", "/v1/resize", R"({"runners": 1})").status, 200);
  stepping.join();
  EXPECT_EQ(service.status()["steps"], 1);
}

// ---- Restart ----

TEST(ServiceRestart, AnotherProcessGoesOnWithTheSameNumbers) {
  const auto expected = undisturbed(3);
  // The policy is for runners that are lost.
  const ServiceRun service([](Config& config) { config.runners.on_loss = LossPolicy::fail; });
  EXPECT_EQ(service.ask("POST", "/v1/step").status, 200);
  const auto before = pids_of(service.status());
  EXPECT_EQ(service.ask("POST", "/v1/restart?rank=1").status, 200);
  EXPECT_EQ(service.ask("POST", "/v1/step", R"({"count": 2})").status, 200);
  const auto status = service.status();
  EXPECT_EQ(pids_of(status)[0], before[0]);
  EXPECT_NE(pids_of(status)[1], before[1]);
  EXPECT_EQ(status["replacements"], 1);
  EXPECT_EQ(status["losses"], 0);
  EXPECT_TRUE(same_bits(gradients_of(service.attach()), expected.gradients));
}

TEST(ServiceRestart, ARunnerThatHangsInAStepOfAHostIsReplaced) {
  const auto expected = undisturbed(2);
  Stage stage;
  const ServiceRun service(restarting(stage));
  auto manager = service.attach();
  expect_ok(manager);
  stage.tell(1, Act::block);
  std::jthread asking([&] {
    stage.wait_until_blocked(1);
    stage.tell(1, Act::compute);  // For its replacement.
    EXPECT_EQ(service.ask("POST", "/v1/restart?rank=1").status, 200);
  });
  expect_ok(manager);
  asking.join();
  EXPECT_TRUE(same_bits(gradients_of(manager), expected.gradients));
}

// ---- Checkpoint ----

class ServiceCheckpoint : public testing::Test {
 protected:
  Config config() const {
    auto config = restarting(stage_);
    config.checkpoint.directory = folder_ / "checkpoints";
    return config;
  }
  const Stage stage_;
  const TemporaryFolder folder_;
};

TEST_F(ServiceCheckpoint, OneThatWasUnderWayBeforeIsNoAnswer) {
  const ServiceRun service(config());
  auto manager = service.attach();
  expect_ok(manager);
  const std::vector<std::byte> large(std::size_t{256} << 20);  // Takes longer to write than to ask.
  manager.save_checkpoint({.tensors = {{"large", DType::uint8, {std::int64_t(large.size())}, large.data()}}});
  expect_ok(manager);
  Answer answer;
  std::jthread asking([&] { answer = service.ask("POST", "/v1/checkpoint"); });
  while (!manager.checkpoint_requested()) std::this_thread::yield();
  manager.save_checkpoint({});
  EXPECT_FALSE(manager.checkpoint_requested());
  asking.join();
  EXPECT_EQ(answer.body["step"], 2) << answer.body;
}

TEST_F(ServiceCheckpoint, AHostThatDoesNotLookIsNamed) {
  const ServiceRun service(config());
  const auto manager = service.attach();
  const auto answer = service.ask("POST", "/v1/checkpoint", R"({"timeout_s": 0})");
  EXPECT_EQ(answer.status, 504);
  EXPECT_EQ(answer.code(), "timeout");
  EXPECT_NE(answer.body["error"]["message"].get<std::string>().find("test (pid"), std::string::npos);
}

TEST_F(ServiceCheckpoint, AHostThatLeavesIsNotWaitedForNorIsTheNextOneAsked) {
  const ServiceRun service(config());
  auto manager = service.attach();
  Answer answer;
  std::jthread asking([&] { answer = service.ask("POST", "/v1/checkpoint"); });
  while (!manager.checkpoint_requested()) std::this_thread::yield();
  manager.stop();
  EXPECT_FALSE(manager.checkpoint_requested());
  asking.join();
  EXPECT_EQ(answer.code(), "host_left") << answer.body;
  EXPECT_FALSE(service.attach().checkpoint_requested());
}

TEST_F(ServiceCheckpoint, OfAHostLiesBelowTheServicesDirectoryAndOneElsewhereIsNoLastOne) {
  const std::filesystem::path directory = config().checkpoint.directory;
  {
    const ServiceRun service(config());
    auto manager = service.attach();
    expect_ok(manager);
    for (const auto* elsewhere : {"outside", "checkpoints/../outside", "checkpoints/../checkpoints2"}) {
      manager.save_checkpoint({.directory = folder_ / elsewhere});
      const auto written = manager.checkpoints_written(30);
      ASSERT_EQ(written.size(), 1u);
      EXPECT_NE(written[0].error.find("only below its own checkpoint.directory"), std::string::npos);
    }
    EXPECT_FALSE(std::filesystem::exists(folder_ / "outside"));
    manager.save_checkpoint({.directory = directory / "mine"});
    EXPECT_EQ(manager.checkpoints_written(30).at(0).error, "");
    EXPECT_TRUE(std::filesystem::exists(directory / "mine" / "step-00000001"));
  }
  EXPECT_TRUE(std::filesystem::exists(directory / "step-00000001")) << "the service has written its own";
}

}  // namespace
}  // namespace accelmgr::test
