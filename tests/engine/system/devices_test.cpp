// Tests of the devices of whole systems: which GPU each runner sees, also the replacements and those of a
// later manager. The driver is a fake, and the runners compute on the CPU: what is tested is what they were
// told.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <stdlib.h>
#include <unistd.h>

#include <fstream>
#include <memory>
#include <thread>

#include "base/config/start_method.hpp"
#include "base/ipc/process.hpp"
#include "base/ipc/zygote.hpp"
#include "engine/support/expectations.hpp"
#include "message_of.hpp"
#include "perceptrons.hpp"
#include "staged_run.hpp"
#include "support.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::test {
namespace {

using testing::ElementsAre;
using testing::UnorderedElementsAre;

constexpr const char* told_perceptron = "told_perceptron";

/// A perceptron that writes down what its runner was told: a line of kind and visible GPU in the file of its
/// rank.
const RegisteredReplica told(told_perceptron, [](const Config& config, replica::Role role) {
  if (role.computes()) {
    const char* visible = getenv("CUDA_VISIBLE_DEVICES");
    std::ofstream(config.model.options.at("folder") + "/" + std::to_string(role.rank), std::ios::app)
        << (config.runners.device == accelmgr::Device::cuda ? "cuda " : "cpu ") << (visible ? visible : "all")
        << '\n';
  }
  auto plain = config;
  plain.model.kind = perceptron;
  return replica::make_replica(plain, role);
});

/// What a runner is told that has that GPU of the fake driver.
std::string on(char gpu) {
  return fmt::format("cuda GPU-{0}0{0}1{0}2{0}3-{0}4{0}5-{0}6{0}7-{0}8{0}9-{0}a{0}b{1:08x}", gpu,
                     std::stoi(getenv("FAKE_DRIVER_MACHINE")));
}

class Devices : public testing::Test {
 protected:
  Devices() {
    unsetenv("CUDA_VISIBLE_DEVICES");
    set_gpus("3");
  }
  ~Devices() override {
    ipc::end_zygote();
    expect_nothing_left();
  }

  static void set_gpus(const char* count) { setenv("FAKE_DRIVER_GPUS", count, 1); }

  Config config(accelmgr::Device device, int nprocs = one_per_device) const {
    auto config = perceptron_config({.inputs = 4, .hidden = 6}, told_perceptron);
    config.model.options["folder"] = folder_.path();
    config.runners.device = device;
    config.nprocs = nprocs;
    config.runners.restart_backoff = 0;
    return config;
  }

  /// What the runners of each rank must have been told.
  void expect_told(const std::vector<std::vector<std::string>>& ranks) const {
    for (std::size_t rank = 0; rank < ranks.size(); ++rank)
      EXPECT_EQ(told_to(static_cast<int>(rank)), ranks[rank]) << "rank " << rank;
  }
  /// What the runners of that rank were told, in the order of their starts.
  std::vector<std::string> told_to(int rank) const {
    std::vector<std::string> lines;
    std::ifstream file(folder_ / std::to_string(rank));
    for (std::string line; std::getline(file, line);) lines.push_back(line);
    return lines;
  }

 private:
  TemporaryFolder folder_;
};

/// Expects that a start is refused because of that option.
void expect_refused(const Config& config, const char* key, std::initializer_list<std::string> parts) {
  try {
    client::Handle(config, {});
    FAIL() << "no exception";
  } catch (const ConfigError& error) {
    EXPECT_EQ(error.key(), key);
    expect_contains(error.what(), parts);
  }
}

class DevicesByStartMethod : public Devices, public testing::WithParamInterface<StartMethod> {};

TEST_P(DevicesByStartMethod, AreOneForEachRunnerAndAsManyAsThereAre) {
  client::Handle manager(config(accelmgr::Device::cuda), {.method = GetParam()});
  expect_ok(manager);
  EXPECT_EQ(manager.statistics().runners.size(), 3u);
  EXPECT_EQ(manager.config().nprocs, 3);
  EXPECT_EQ(manager.config().runners.device, accelmgr::Device::cuda);
  expect_told({{on('a')}, {on('b')}, {on('c')}});
}

INSTANTIATE_TEST_SUITE_P(All, DevicesByStartMethod,
                         testing::Values(StartMethod::spawn, StartMethod::fork, StartMethod::forkserver),
                         [](const auto& info) { return config::name_of(info.param); });

TEST_F(Devices, StayWithTheirRanksWhateverIsLost) {
  client::Handle manager(config(accelmgr::Device::automatic, 2), {});
  expect_ok(manager);
  kill_and_wait(manager.statistics().runners.at(1).pid);
  EXPECT_TRUE(manager.step().counted);
  expect_told({{on('a')}, {on('b'), on('b')}});
  set_gpus("0");  // The new manager does not ask the driver again.
  kill_and_wait(manager.statistics().manager_pid);
  EXPECT_EQ(manager.step().status, StepStatus::manager_lost);
  manager.recover();
  expect_ok(manager);
  expect_told({{on('a'), on('a')}, {on('b'), on('b'), on('b')}});
  kill_and_wait(parent_of(manager.statistics().runners.at(0).pid));  // The fork server; another is executed.
  EXPECT_TRUE(manager.step().counted);
  expect_told({{on('a'), on('a'), on('a')}, {on('b'), on('b'), on('b'), on('b')}});
}

TEST_F(Devices, MayBeMixedWithTheCpuWhoseRunnersSeeNoGpu) {
  auto mixed = config(accelmgr::Device::cuda);
  mixed.runners.devices = {"2", "cpu", "GPU-a0"};
  client::Handle manager(mixed, {});
  expect_ok(manager);
  expect_told({{on('c')}, {"cpu "}, {on('a')}});
}

TEST_F(Devices, OfAnotherSessionAreLeftToIt) {
  client::Handle first(config(accelmgr::Device::automatic, 2), {});
  expect_ok(first);
  {
    client::Handle second(config(accelmgr::Device::cuda), {});  // One runner for each GPU that is free.
    expect_ok(second);
    EXPECT_THAT(told_to(0), ElementsAre(on('a'), on('c')));
    EXPECT_EQ(second.statistics().runners.size(), 1u);
    const auto other = fmt::format("by process {}", first.statistics().manager_pid);
    for (const auto device : {accelmgr::Device::automatic, accelmgr::Device::cuda})
      expect_refused(config(device), "runners.device",
                     {"other sessions have all GPUs", other, "runners.oversubscribe"});
    auto naming = config(accelmgr::Device::cuda);
    naming.runners.devices = {"1"};
    expect_refused(naming, "runners.devices", {"GPU 1", other, "runners.oversubscribe"});
    naming.runners.oversubscribe = true;
    client::Handle sharing(naming, {});
    expect_ok(sharing);
    EXPECT_THAT(told_to(0), ElementsAre(on('a'), on('c'), on('b')));
  }
  kill_and_wait(first.statistics().manager_pid);
  EXPECT_EQ(first.step().status, StepStatus::manager_lost);
  first.recover();
  expect_ok(first);
  client::Handle next(config(accelmgr::Device::cuda), {});
  EXPECT_EQ(next.statistics().runners.size(), 1u) << "the manager that took the session over has its GPUs";
}

/// What a runner is told that has that slice of the fake driver's first GPU.
std::string on_slice(int number) {
  return fmt::format("cuda MIG-a0a1a2a3-{:02}a5-a6a7-a8a9-aaab{:08x}", number,
                     std::stoi(getenv("FAKE_DRIVER_MACHINE")));
}

class DeviceSlices : public Devices {
 protected:
  DeviceSlices() {
    set_gpus("1");
    setenv("FAKE_DRIVER_SLICES", "3", 1);
  }
  ~DeviceSlices() override { unsetenv("FAKE_DRIVER_SLICES"); }
};

TEST_F(DeviceSlices, HaveARunnerEachAndGoToOneSessionEach) {
  client::Handle first(config(accelmgr::Device::cuda, 2), {});
  expect_ok(first);
  expect_told({{on_slice(0)}, {on_slice(1)}});
  client::Handle second(config(accelmgr::Device::cuda), {});
  expect_ok(second);
  EXPECT_THAT(told_to(0), ElementsAre(on_slice(0), on_slice(2)));
  auto naming = config(accelmgr::Device::cuda);
  naming.runners.devices = {on_slice(2).substr(5)};
  expect_refused(naming, "runners.devices",
                 {"names a GPU that another session has", "MIG-a0a1a2a3-02a5",
                  fmt::format("by process {}", second.statistics().manager_pid)});
}

TEST_F(Devices, GoToOneOfTwoSessionsThatBeginAtOnce) {
  set_gpus("2");
  std::vector<std::unique_ptr<client::Handle>> sessions(2);
  {
    std::vector<std::jthread> starts;
    for (auto& session : sessions)
      starts.emplace_back([&] {
        session =
            std::make_unique<client::Handle>(config(accelmgr::Device::cuda, 1), client::StartSettings{});
      });
  }
  for (auto& session : sessions) expect_ok(*session);
  EXPECT_THAT(told_to(0), UnorderedElementsAre(on('a'), on('b')));
}

TEST_F(Devices, AreNotAskedForByARunOnTheCpu) {
  setenv("FAKE_DRIVER_HANGS", "1", 1);
  client::Handle manager(config(accelmgr::Device::cpu, 1), {});
  unsetenv("FAKE_DRIVER_HANGS");
  expect_ok(manager);
  EXPECT_THAT(told_to(0), ElementsAre("cpu all"));
}

}  // namespace
}  // namespace accelmgr::test
