// Checks what a service and its hosts write to checkpoints, and what the next service and host find there.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "accelmgr/errors.hpp"
#include "base/config/loader.hpp"
#include "engine/checkpoint/folder.hpp"
#include "engine/checkpoint/lock.hpp"
#include "service_run.hpp"

namespace accelmgr::test {
namespace {

namespace fs = std::filesystem;

/// What a service with checkpoints needs. A lost runner is replaced at once.
struct Checkpointed {
  Checkpointed() : config(restarting(stage)) { config.checkpoint.directory = folder / "checkpoints"; }
  const Stage stage;
  const TemporaryFolder folder;
  Config config;
};

TEST(Service, WritesACheckpointWhenItEnds) {
  Checkpointed on;
  Tensors gradients;
  {
    ServiceRun service(on.config);
    EXPECT_TRUE(fs::exists(on.folder / "checkpoints" / ".lock"));
    EXPECT_EQ(service.ask("POST", "/v1/step", R"({"count": 2})").status, 200);
    {
      const auto manager = service.attach();
      gradients = gradients_of(manager);
    }
    service.wait_until_alone();
    EXPECT_EQ(service.terminate(), 0);
    EXPECT_FALSE(fs::exists(on.folder / "checkpoints" / ".lock"));
  }
  on.config.checkpoint.resume = "latest";
  const ServiceRun service(on.config);
  EXPECT_EQ(service.status()["steps"], 2);
  EXPECT_TRUE(same_bits(gradients_of(service.attach()), gradients));
}

// One of the service would not have the host's optimizer.
TEST(Service, LeavesTheCheckpointOfAHostAsItIsWhenItEnds) {
  using nlohmann::literals::operator""_json_pointer;
  Checkpointed on;
  on.config.checkpoint.directory += "/";
  for (const bool resumed : {false, true}) {
    ServiceRun service(on.config);
    if (!resumed) {
      auto manager = service.attach();
      expect_ok(manager);
      manager.save_checkpoint({.json = R"({"optimizer": 17})"});
    }
    EXPECT_EQ(service.terminate(), 0);
    std::ifstream file(on.folder / "checkpoints" / checkpoint::folder_name(1) / checkpoint::state_file);
    EXPECT_EQ(nlohmann::json::parse(file).value("/state/run/host/optimizer"_json_pointer, 0), 17);
    on.config.checkpoint.resume = "latest";
  }
}

/// What `manager` finds of the one before: the optimizer, the step it is of, and the step of the checkpoint.
std::string found_by(const client::Handle& manager) {
  const auto& resumed = manager.resumed();
  if (!resumed) return "nothing";
  std::string text;
  for (const auto& tensor : resumed->tensors) text += fmt::format("{}={} ", tensor.name, int(tensor.data[0]));
  return text + fmt::format("{} of step {} in step {}", resumed->json, resumed->extras_step, resumed->step);
}

// A service has no optimizer: it keeps the last one.
TEST(Service, AHostGetsWhatTheLastOneHasSaved) {
  Checkpointed on;
  on.config.checkpoint.keep = 1;
  const std::byte momentum{7};
  {
    ServiceRun service(on.config);
    EXPECT_EQ(service.ask("POST", "/v1/checkpoint").status, 200);
    {
      auto manager = service.attach();
      EXPECT_EQ(found_by(manager), "nothing") << "the service alone has saved";
      EXPECT_EQ(manager.run_id(), service.status()["run_id"]);
      expect_ok(manager);
      manager.save_checkpoint(
          {.tensors = {{"momentum", DType::uint8, {1}, &momentum}}, .json = R"({"lr":3})"});
      ASSERT_EQ(manager.checkpoints_written(30).at(0).error, "");
    }
    EXPECT_EQ(found_by(service.attach()), R"(momentum=7 {"lr":3} of step 1 in step 1)");
    service.wait_until_alone();
    EXPECT_EQ(service.ask("POST", "/v1/step").status, 200);
    EXPECT_EQ(service.ask("POST", "/v1/checkpoint").status, 200);
    EXPECT_EQ(found_by(service.attach()), R"(momentum=7 {"lr":3} of step 1 in step 2)");
    service.wait_until_alone();
    EXPECT_EQ(service.ask("POST", "/v1/step").status, 200);
    EXPECT_EQ(service.terminate(), 0);
  }
  on.config.checkpoint.resume = "latest";
  const ServiceRun again(on.config);
  EXPECT_EQ(found_by(again.attach()), R"(momentum=7 {"lr":3} of step 1 in step 3)");
}

TEST(Service, WritesNoCheckpointsBesideThoseOfAnotherRun) {
  Checkpointed on;
  {
    ServiceRun service(on.config);
    EXPECT_EQ(service.ask("POST", "/v1/step").status, 200);
    EXPECT_EQ(service.terminate(), 0);
  }
  RoleProcess other(serves, {config::to_yaml(on.config), on.folder / "socket"});
  EXPECT_EQ(other.line(), "");
  const int status = other.status();
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 2) << status << ": no restart mends it";
}

TEST(Service, LocksADirectoryThatWasRemovedBeforeAHostSavesThere) {
  Checkpointed on;
  const fs::path directory = on.config.checkpoint.directory;
  const ServiceRun service(on.config);
  auto manager = service.attach();
  const auto saves = [&] {
    expect_ok(manager);
    manager.save_checkpoint({});
    return manager.checkpoints_written(60).at(0).error;
  };
  EXPECT_EQ(saves(), "");
  fs::remove_all(directory);
  EXPECT_EQ(saves(), "");
  EXPECT_TRUE(fs::exists(directory / checkpoint::folder_name(2)));
  EXPECT_THROW(checkpoint::DirectoryLock{directory}, CheckpointError);
  fs::remove_all(directory);
  {
    const checkpoint::DirectoryLock other(directory);
    EXPECT_THAT(saves(), testing::HasSubstr("is in use by"));
  }
  EXPECT_EQ(saves(), "");
}

TEST(Service, WritesHalfWrittenParametersBesideTheLastGoodOnes) {
  Checkpointed on;
  ServiceRun service(on.config);
  EXPECT_EQ(service.ask("POST", "/v1/step").status, 200);
  EXPECT_EQ(service.ask("POST", "/v1/checkpoint").status, 200);
  AttachedHost host(service, {"step", "write"});
  for (const auto* expected : {"", "ok", "write"}) EXPECT_EQ(host.line(), expected);
  host.kill_and_wait();
  EXPECT_EQ(service.terminate(), 0);
  const std::filesystem::path directory = on.config.checkpoint.directory;
  EXPECT_TRUE(std::filesystem::exists(directory / "step-00000001"));
  EXPECT_FALSE(std::filesystem::exists(directory / "step-00000002"));
  EXPECT_TRUE(std::filesystem::exists(directory / "half-written" / "step-00000002"));
}

}  // namespace
}  // namespace accelmgr::test
