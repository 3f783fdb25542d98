// Tests of listing the GPUs of a machine, with a fake of the driver: no GPU is needed.
#include "engine/device/gpu_list.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <stdlib.h>

#include <tuple>

#include "base/ipc/process.hpp"
#include "engine/device/gpu_claims.hpp"
#include "places.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::device {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

/// Sets a variable until the end of the test.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;
  ~Variable() { unsetenv(name_); }

 private:
  const char* name_;
};

const std::string fake_driver = test::built("tests/engine/support/fake_driver/libcuda.so.1");
const std::string fake_nvml = test::built("tests/engine/support/fake_driver/libnvidia-ml.so.1");

DriverQuestion of_fake(double timeout_s = 60) {
  return {.library = fake_driver, .nvml = fake_nvml, .timeout_s = timeout_s};
}

std::string why_none() { return list_gpus(of_fake()).why_none; }

class ListedGpus : public testing::Test {
 protected:
  ListedGpus() { unsetenv("CUDA_VISIBLE_DEVICES"); }
  ~ListedGpus() override {
    for (const auto& library : {fake_driver, fake_nvml})
      EXPECT_EQ(dlopen(library.c_str(), RTLD_NOW | RTLD_NOLOAD), nullptr) << library << " is in this process";
    EXPECT_TRUE(ipc::children().empty());
  }
};

TEST_F(ListedGpus, HaveNameMemoryUuidAndComputeCapability) {
  const auto gpus = list_gpus(of_fake());
  ASSERT_EQ(gpus.visible.size(), 2u) << gpus.why_none;
  EXPECT_EQ(gpus.visible[1], (Gpu{.name = "Fake GPU B",
                                  .uuid = "GPU-b0b1b2b3-b4b5-b6b7-b8b9-babbbcbdbebf",
                                  .memory_bytes = std::uint64_t{32} << 30,
                                  .major = 9,
                                  .minor = 0}));
  EXPECT_EQ(describe(gpus, 0),
            "GPU 0 (Fake GPU A, 16.0 GiB, compute capability 9.0, GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf)");
}

TEST_F(ListedGpus, AreThoseThatTheEnvironmentLeavesInItsOrder) {
  const Variable visible("CUDA_VISIBLE_DEVICES", "1,0,7");
  const auto gpus = list_gpus(of_fake());
  ASSERT_EQ(gpus.visible.size(), 2u);
  EXPECT_EQ(gpus.visible[0].name, "Fake GPU B");
  EXPECT_EQ(gpus.visible[1].name, "Fake GPU A");
}

TEST_F(ListedGpus, SayWhoHasTakenThem) {
  const Variable machine("FAKE_DRIVER_MACHINE", std::to_string(getpid()).c_str());
  const auto uuid = list_gpus(of_fake()).visible.at(1).uuid;
  Config config;
  config.runners.device = accelmgr::Device::cuda;
  config.runners.devices = {"cpu", uuid, uuid};
  {
    const GpuClaims claims(config);
    EXPECT_EQ(claims.missed(), "");
    EXPECT_EQ(GpuClaims(config).missed(), uuid);
    const auto gpus = list_gpus(of_fake());
    EXPECT_EQ(gpus.visible.at(0).taken_by, "");
    EXPECT_EQ(gpus.visible.at(1).taken_by, "process " + std::to_string(getpid()));
  }
  EXPECT_EQ(list_gpus(of_fake()).visible.at(1).taken_by, "");
  EXPECT_EQ(GpuClaims(config).missed(), "");
  config.runners.oversubscribe = true;
  const GpuClaims none(config);
  EXPECT_TRUE(none.sockets().empty());
}

TEST_F(ListedGpus, ThatAreAllHiddenAreCountedAndTheVariableIsNamed) {
  const Variable hidden("CUDA_VISIBLE_DEVICES", "");
  EXPECT_EQ(why_none(), "CUDA_VISIBLE_DEVICES is '' and hides all 2 GPUs");
  const Variable one("FAKE_DRIVER_GPUS", "1");
  const Variable absent("CUDA_VISIBLE_DEVICES", "3");
  EXPECT_EQ(why_none(), "CUDA_VISIBLE_DEVICES is '3' and hides the GPU");
}

TEST_F(ListedGpus, AreNoneWithoutADriver) {
  EXPECT_THAT(list_gpus({.library = "/nowhere/libcuda.so.1"}).why_none,
              HasSubstr("there is no driver library /nowhere/libcuda.so.1"));
  const test::TemporaryFolder folder;
  const auto broken = folder.write("libcuda.so.1", "no library");
  EXPECT_THAT(list_gpus({.library = broken}).why_none,
              AllOf(HasSubstr("the driver library cannot be loaded"), HasSubstr(broken)));
  EXPECT_THAT(list_gpus({.library = "libm.so.6"}).why_none,
              HasSubstr("the driver library libm.so.6 has no cuInit"));
}

TEST_F(ListedGpus, AreNoneWhereTheDriverFailsAndItsErrorIsTold) {
  {
    const Variable none("FAKE_DRIVER_GPUS", "0");
    EXPECT_THAT(why_none(),
                HasSubstr("cuInit: CUDA_ERROR_NO_DEVICE (100): no CUDA-capable device is detected; "));
    const Variable visible("CUDA_VISIBLE_DEVICES", "0");
    EXPECT_THAT(why_none(), AllOf(HasSubstr("CUDA_ERROR_NO_DEVICE"), Not(HasSubstr("hides"))));
  }
  {
    const Variable fails("FAKE_DRIVER_FAILS", "803");
    EXPECT_THAT(why_none(), HasSubstr("cuInit: an unknown error (803): no text"));
  }
  for (const std::string function : {"cuDeviceGetName", "cuDeviceGetUuid", "cuDeviceTotalMem"}) {
    const Variable fails("FAKE_DRIVER_FAILS", function.c_str());
    EXPECT_THAT(why_none(), HasSubstr(function + " of GPU 0: CUDA_ERROR_UNKNOWN (999): a text"));
  }
}

TEST_F(ListedGpus, AreNoneWhereTheDriverFailsAndWhatTheKernelSaysIsToldToo) {
  const Variable fails("FAKE_DRIVER_FAILS", "999");
  const test::TemporaryFolder root;
  const auto why = [&] {
    auto question = of_fake();
    question.root = root.path();
    return list_gpus(question).why_none;
  };
  EXPECT_THAT(why(), HasSubstr("; no device of an NVIDIA GPU is in /dev"));
  root.write("dev/nvidia0", "");
  EXPECT_THAT(why(), HasSubstr("; the GPUs' devices are there, and this process can open them"));
  const auto closed = root / "dev/nvidia1";
  std::filesystem::create_directory(closed);  // Even root cannot open a folder as it opens a device.
  EXPECT_THAT(why(), HasSubstr("; this process cannot open " + closed.string() + ": Is a directory"));
}

TEST_F(ListedGpus, AreNoneInAForkOfAProcessThatUsesTheDriver) {
  const Variable fails("FAKE_DRIVER_FAILS", "3");
  EXPECT_THAT(why_none(), Not(HasSubstr("forked from")));
  void* driver = dlopen(fake_driver.c_str(), RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(driver, nullptr);
  EXPECT_THAT(why_none(), AllOf(HasSubstr("cuInit: "), HasSubstr("the driver ran already in the process"),
                                HasSubstr("spawn and forkserver")));
  dlclose(driver);
}

TEST_F(ListedGpus, StandBesideTheChipsOfATpuUnlessPjrtDeviceNamesAnotherKind) {
  const test::TemporaryFolder root;
  for (const std::string chip : {"0000:00:04.0", "0000:00:05.0"}) {
    root.write("sys/bus/pci/devices/" + chip + "/vendor", "0x1ae0\n");
    root.write("sys/bus/pci/devices/" + chip + "/device", "0x0063\n");
  }
  auto question = of_fake();
  question.root = root.path();
  EXPECT_EQ(this_machine(question).tpu_chips, 2);
  for (const auto& [kind, chips] : {std::pair{"", 2}, {"TPU", 2}, {"CPU", 0}}) {
    const Variable chosen("PJRT_DEVICE", kind);
    EXPECT_EQ(this_machine(question).tpu_chips, chips) << kind;
  }
}

TEST_F(ListedGpus, AreNoneWhereTheDriverHangs) {
  const Variable hangs("FAKE_DRIVER_HANGS", "1");
  const Variable visible("CUDA_VISIBLE_DEVICES", "0");
  const auto begin = base::now_ns();
  EXPECT_THAT(list_gpus(of_fake(0.5)).why_none, HasSubstr("the driver did not answer within 0.5 s"));
  EXPECT_LT(double(base::now_ns() - begin) / 1e9, 60);
}

TEST_F(ListedGpus, AreNoneWhereTheDriverCrashes) {
  const Variable crashes("FAKE_DRIVER_CRASHES", "1");
  EXPECT_EQ(why_none(), "the driver ended the process that asked it: killed by signal 11 (SEGV)");
}

const std::string gpu_b = "GPU-b0b1b2b3-b4b5-b6b7-b8b9-babbbcbdbebf";

/// The UUID of a slice of the fake's GPU A or B.
std::string slice(char gpu, int number) {
  return fmt::format("MIG-{0}0{0}1{0}2{0}3-{1:02}{0}5-{0}6{0}7-{0}8{0}9-{0}a{0}b{0}c{0}d{0}e{0}f",
                     static_cast<char>(gpu - 'A' + 'a'), number);
}

std::vector<std::string> uuids(const Gpus& gpus) {
  std::vector<std::string> all;
  for (const auto& gpu : gpus.visible) all.push_back(gpu.uuid);
  return all;
}

std::vector<std::string> all_uuids() { return uuids(list_gpus(of_fake())); }

class ListedSlices : public ListedGpus {
 protected:
  static std::vector<std::string> seen_with(const std::string& visible, const DriverQuestion& question) {
    const Variable variable("CUDA_VISIBLE_DEVICES", visible.c_str());
    return uuids(list_gpus(question));
  }
};

TEST_F(ListedSlices, AreAllThoughCudaShowsOneAndHidesWholeGpus) {
  const Variable slices("FAKE_DRIVER_SLICES", "2,1");
  const auto gpus = list_gpus(of_fake());
  EXPECT_THAT(uuids(gpus), ElementsAre(slice('A', 0), slice('A', 1), slice('B', 0))) << gpus.why_none;
  EXPECT_EQ(gpus.visible.at(1), (Gpu{.name = "Fake GPU A MIG 1g.5gb",
                                     .uuid = slice('A', 1),
                                     .memory_bytes = std::uint64_t{5} << 30,
                                     .major = 9,
                                     .minor = 0}));
  EXPECT_EQ(describe(gpus, 2),
            "GPU 2 (Fake GPU B MIG 1g.5gb, 5.0 GiB, compute capability 9.0, " + slice('B', 0) + ")");
  EXPECT_EQ(gpus.sliced.at(1).whole.uuid, gpu_b);
  const Variable one("FAKE_DRIVER_SLICES", "1");
  EXPECT_THAT(all_uuids(), ElementsAre(slice('A', 0), gpu_b)) << "a whole GPU beside a slice";
}

TEST_F(ListedSlices, AreThoseThatTheEnvironmentLeavesInItsOrder) {
  const Variable slices("FAKE_DRIVER_SLICES", "2,2");
  const auto [a0, a1, b0, b1] = std::tuple(slice('A', 0), slice('A', 1), slice('B', 0), slice('B', 1));
  EXPECT_THAT(seen_with(a1 + "," + a0, of_fake()), ElementsAre(a1, a0));
  EXPECT_THAT(seen_with("1", of_fake()), ElementsAre(b0, b1)) << "the number of a GPU";
  EXPECT_THAT(seen_with("GPU-b0," + a1, of_fake()), ElementsAre(b0, b1, a1));
  EXPECT_THAT(seen_with(b1 + ",7," + a0, of_fake()), ElementsAre(b1)) << "CUDA stops at an unknown one";
  const Variable hidden("CUDA_VISIBLE_DEVICES", "");
  EXPECT_EQ(why_none(), "CUDA_VISIBLE_DEVICES is '' and hides all 4 GPUs");
}

TEST_F(ListedSlices, ThatAreNamedAreTakenToBeThereWhereNothingListsThem) {
  const Variable slices("FAKE_DRIVER_SLICES", "3");
  auto without = of_fake();
  without.nvml = "/nowhere/libnvidia-ml.so.1";
  EXPECT_THAT(uuids(list_gpus(without)), ElementsAre(slice('A', 0))) << "the one that CUDA shows";
  EXPECT_THAT(seen_with(slice('A', 1) + "," + slice('A', 2), without),
              ElementsAre(slice('A', 1), slice('A', 2)));
  const std::string of_old_drivers = "MIG-GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf/1/0";
  without.named = {"0",        "cpu",   "mig" + slice('A', 2).substr(3), slice('A', 0), of_old_drivers,
                   "MIG-a0a1", "GPU-c0"};
  EXPECT_THAT(uuids(list_gpus(without)), ElementsAre(slice('A', 0), slice('A', 2), of_old_drivers))
      << "only whole names, once each";
  EXPECT_EQ(describe(list_gpus(without), 1),
            "GPU 1 (a MIG slice that nothing lists here, " + slice('A', 2) + ")");
  const Variable fails("FAKE_NVML_FAILS", "nvmlInit_v2");
  without.nvml = fake_nvml;
  EXPECT_THAT(uuids(list_gpus(without)), ElementsAre(slice('A', 0), slice('A', 2), of_old_drivers));
}

TEST_F(ListedSlices, ThatAreNamedButNotThereAreNotListed) {
  const Variable slices("FAKE_DRIVER_SLICES", "1,1");
  auto question = of_fake();
  question.named = {slice('A', 5)};
  EXPECT_THAT(uuids(list_gpus(question)), ElementsAre(slice('A', 0), slice('B', 0)));
  EXPECT_THAT(seen_with(slice('A', 0) + "," + slice('A', 5), question), ElementsAre(slice('A', 0)));
}

TEST_F(ListedSlices, AreLeftOutWhereNvmlFailsForThem) {
  const Variable slices("FAKE_DRIVER_SLICES", "2");
  for (const char* function : {"nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex"}) {
    const Variable fails("FAKE_NVML_FAILS", function);
    EXPECT_THAT(all_uuids(), ElementsAre(slice('A', 0), gpu_b)) << function;
  }
  for (const char* function :
       {"nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetMigMode", "nvmlDeviceGetUUID"}) {
    const Variable fails("FAKE_NVML_FAILS", function);
    EXPECT_THAT(all_uuids(), Contains(slice('A', 0))) << function;
  }
}

TEST_F(ListedSlices, AreClaimedEachForItself) {
  const Variable slices("FAKE_DRIVER_SLICES", "2");
  const Variable machine("FAKE_DRIVER_MACHINE", std::to_string(getpid()).c_str());
  const auto before = list_gpus(of_fake());
  Config first, second;
  first.runners.device = second.runners.device = accelmgr::Device::cuda;
  first.runners.devices = {before.visible.at(0).uuid};
  second.runners.devices = {before.visible.at(1).uuid};
  const GpuClaims one(first), other(second);
  EXPECT_EQ(one.missed() + other.missed(), "");
  EXPECT_EQ(GpuClaims(second).missed(), before.visible.at(1).uuid);
  EXPECT_THAT(list_gpus(of_fake()).visible.at(1).taken_by, HasSubstr("process"));
}

TEST_F(ListedSlices, ThatAreMissingAreNamedAsTheReason) {
  const Variable one("FAKE_DRIVER_GPUS", "1");
  const Variable slices("FAKE_DRIVER_SLICES", "0");
  const auto gpus = list_gpus(of_fake());
  EXPECT_THAT(gpus.why_none, AllOf(HasSubstr("CUDA_ERROR_NO_DEVICE"), HasSubstr("Fake GPU A"),
                                   HasSubstr("MIG mode is on"), HasSubstr("nvidia-smi mig -cgi")));
}

}  // namespace
}  // namespace accelmgr::device
