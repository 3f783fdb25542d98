// Tests of the devices of whole systems: which GPU each runner sees, also the replacements and those of a
// later manager. The driver is a fake, and the runners compute on the CPU: what is tested is what they were
// told.
#include <gmock/gmock.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <fstream>

#include "config/start_method.hpp"
#include "ipc/process.hpp"
#include "launch/zygote.hpp"
#include "perceptrons.hpp"
#include "staged_run.hpp"
#include "support.hpp"
#include "support/expectations.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::test {
namespace {

using testing::ElementsAre;

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

const std::string on_a = "cuda GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf";
const std::string on_b = "cuda GPU-b0b1b2b3-b4b5-b6b7-b8b9-babbbcbdbebf";
const std::string on_c = "cuda GPU-c0c1c2c3-c4c5-c6c7-c8c9-cacbcccdcecf";

class Devices : public testing::Test {
 protected:
  Devices() {
    unsetenv("CUDA_VISIBLE_DEVICES");
    set_gpus("3");
  }
  ~Devices() override {
    launch::end_zygote();
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

void kill_and_wait(pid_t pid) {
  const auto pidfd = ipc::open_pidfd(pid);
  ipc::send_signal(pidfd.get(), SIGKILL);
  ASSERT_TRUE(ipc::wait_ended(pidfd.get(), soon()));
}

class DevicesByStartMethod : public Devices, public testing::WithParamInterface<StartMethod> {};

TEST_P(DevicesByStartMethod, AreOneForEachRunnerAndAsManyAsThereAre) {
  client::Handle manager(config(accelmgr::Device::cuda), {.method = GetParam()});
  expect_ok(manager);
  EXPECT_EQ(manager.statistics().runners.size(), 3u);
  EXPECT_EQ(manager.config().nprocs, 3);
  EXPECT_EQ(manager.config().runners.device, accelmgr::Device::cuda);
  EXPECT_THAT(told_to(0), ElementsAre(on_a));
  EXPECT_THAT(told_to(1), ElementsAre(on_b));
  EXPECT_THAT(told_to(2), ElementsAre(on_c));
}

INSTANTIATE_TEST_SUITE_P(All, DevicesByStartMethod,
                         testing::Values(StartMethod::spawn, StartMethod::fork, StartMethod::forkserver),
                         [](const auto& info) { return config::name_of(info.param); });

TEST_F(Devices, StayWithTheirRanksWhateverIsLost) {
  client::Handle manager(config(accelmgr::Device::automatic, 2), {});
  expect_ok(manager);
  kill_and_wait(manager.statistics().runners.at(1).pid);
  EXPECT_TRUE(manager.step().counted);
  EXPECT_THAT(told_to(0), ElementsAre(on_a));
  EXPECT_THAT(told_to(1), ElementsAre(on_b, on_b));
  set_gpus("0");  // The new manager does not ask the driver again.
  kill_and_wait(manager.statistics().manager_pid);
  EXPECT_EQ(manager.step().status, StepStatus::manager_lost);
  manager.recover();
  expect_ok(manager);
  EXPECT_THAT(told_to(0), ElementsAre(on_a, on_a));
  EXPECT_THAT(told_to(1), ElementsAre(on_b, on_b, on_b));
  kill_and_wait(parent_of(manager.statistics().runners.at(0).pid));  // The fork server; another is executed.
  EXPECT_TRUE(manager.step().counted);
  EXPECT_THAT(told_to(0), ElementsAre(on_a, on_a, on_a));
  EXPECT_THAT(told_to(1), ElementsAre(on_b, on_b, on_b, on_b));
}

TEST_F(Devices, MayBeMixedWithTheCpuWhoseRunnersSeeNoGpu) {
  auto mixed = config(accelmgr::Device::cuda);
  mixed.runners.devices = {"2", "cpu", "GPU-a0"};
  client::Handle manager(mixed, {});
  expect_ok(manager);
  EXPECT_THAT(told_to(0), ElementsAre(on_c));
  EXPECT_THAT(told_to(1), ElementsAre("cpu "));
  EXPECT_THAT(told_to(2), ElementsAre(on_a));
}

TEST_F(Devices, AreThereForTheRunnersOfAResize) {
  auto growing = config(accelmgr::Device::cuda, 1);
  growing.runners.max_runners = 2;
  client::Handle manager(growing, {});
  expect_ok(manager);
  manager.resize(2);
  expect_ok(manager);
  EXPECT_THAT(told_to(1), ElementsAre(on_b));
}

TEST_F(Devices, ThatAreMissingRefuseTheStart) {
  set_gpus("0");
  try {
    client::Handle(config(accelmgr::Device::cuda), {});
    FAIL() << "no exception";
  } catch (const ConfigError& error) {
    EXPECT_EQ(error.key(), "runners.device");
    expect_contains(error.what(), {"runners.device is cuda, but no GPU can be used", "CUDA_ERROR_NO_DEVICE"});
  }
}

TEST_F(Devices, ThatAreMissingLeaveTheCpuWhereThatIsAllowed) {
  set_gpus("0");
  setenv("CUDA_VISIBLE_DEVICES", "5", 1);
  client::Handle manager(config(accelmgr::Device::automatic), {});
  expect_ok(manager);
  EXPECT_EQ(manager.config().nprocs, 2);
  EXPECT_EQ(manager.config().runners.device, accelmgr::Device::cpu);
  EXPECT_THAT(told_to(0), ElementsAre("cpu 5")) << "a run on the CPU changes no variable";
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
