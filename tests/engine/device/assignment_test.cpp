// Tests of the choice of devices: a function of the configuration and of a machine, which is invented here.
#include "engine/device/assignment.hpp"

#include <gmock/gmock.h>

#include "accelmgr/errors.hpp"
#include "refusal.hpp"

namespace accelmgr::device {
namespace {

using testing::HasSubstr;

const std::string a = "GPU-aa10", b = "GPU-aa20", c = "GPU-bb30", d = "GPU-bb40", s1 = "MIG-dd10",
                  s2 = "MIG-dd20";

Machine with_gpus(std::size_t count) {
  Machine machine{.gpus = {.visible = {}, .why_none = "the driver is gone"}, .tpu_chips = 0, .cores = 16};
  for (const auto& uuid : {a, b, c, d})
    if (machine.gpus.visible.size() < count)
      machine.gpus.visible.push_back(
          {.name = "T4", .uuid = uuid, .memory_bytes = std::uint64_t{15} << 30, .major = 7, .minor = 5});
  return machine;
}

/// The first of them are those of another session.
Machine with_taken_gpus(std::size_t taken, std::size_t count) {
  auto machine = with_gpus(count);
  for (std::size_t i = 0; i < taken; ++i) machine.gpus.visible[i].taken_by = "process 47";
  return machine;
}

Machine with_chips(int count) {
  auto machine = with_gpus(0);
  machine.tpu_chips = count;
  return machine;
}

/// A whole GPU and two slices of another, and one whose MIG mode is on and that has none.
Machine with_slices() {
  auto machine = with_gpus(1);
  for (const auto& uuid : {s1, s2})
    machine.gpus.visible.push_back(
        {.name = "A100 MIG 1g.5gb", .uuid = uuid, .memory_bytes = std::uint64_t{5} << 30, .major = 8});
  const auto& visible = machine.gpus.visible;
  machine.gpus.sliced = {{{.name = "A100", .uuid = "GPU-cc50"}, {visible[1], visible[2]}},
                         {{.name = "A30", .uuid = "GPU-cc60"}, {}}};
  return machine;
}

struct Asked {
  Device device = Device::automatic;
  int nprocs = one_per_device;
  std::vector<std::string> devices{};
  bool oversubscribe = false;
  int max_runners = 0;
  std::string model = "mlp";
};

Config config_of(const Asked& asked) {
  Config config;
  config.nprocs = asked.nprocs;
  config.runners.device = asked.device;
  config.runners.devices = asked.devices;
  config.runners.oversubscribe = asked.oversubscribe;
  config.runners.max_runners = asked.max_runners;
  config.model.kind = asked.model;
  return config;
}

constexpr auto automatic = Device::automatic, cuda = Device::cuda, xla = Device::xla, cpu = Device::cpu,
               accelerator = Device::accelerator;
constexpr auto each = one_per_device;

struct Choice {
  std::string name;
  Machine machine;
  Asked asked;
  Device device;
  int nprocs;
  std::vector<std::string> devices{};
};

void expect_chosen(const Choice& expected) {
  SCOPED_TRACE(expected.name);
  const auto assigned = assign_devices(config_of(expected.asked), expected.machine);
  const auto& config = assigned.config;
  EXPECT_EQ(config.runners.device, expected.device);
  EXPECT_EQ(config.nprocs, expected.nprocs);
  EXPECT_EQ(config.runners.devices, expected.devices);
  EXPECT_EQ(assigned.ranks.size(), static_cast<std::size_t>(config.nprocs));
  const bool fell_back =
      expected.asked.device == automatic && expected.asked.devices.empty() && expected.device == cpu;
  EXPECT_EQ(assigned.why_cpu, fell_back ? "the driver is gone" : "");
}

TEST(Devices, AreChosen) {
  const Choice choices[] = {
      Choice{"EveryGpu", with_gpus(3), {automatic}, cuda, 3, {a, b, c}},
      Choice{"EveryGpuOfCuda", with_gpus(2), {cuda}, cuda, 2, {a, b}},
      Choice{"AsManyAsAreAskedFor", with_gpus(3), {automatic, 2}, cuda, 2, {a, b}},
      Choice{"GpusBeforeChips", {with_gpus(1).gpus, 4, 8}, {automatic}, cuda, 1, {a}},
      Choice{"Numbers", with_gpus(3), {cuda, each, {"2", "0"}}, cuda, 2, {c, a}},
      Choice{"ListAndCount", with_gpus(3), {cuda, 2, {"2", "0"}}, cuda, 2, {c, a}},
      Choice{"Uuids", with_gpus(4), {cuda, each, {"GPU-bb40", "GPU-aa1"}}, cuda, 2, {d, a}},
      Choice{"UuidInCapitals", with_gpus(4), {cuda, each, {"gpu-BB3"}}, cuda, 1, {c}},
      Choice{"MixedWithTheCpu",
             with_gpus(2),
             {automatic, each, {"1", "cpu", "cpu"}},
             cuda,
             3,
             {b, "cpu", "cpu"}},
      Choice{"SharedInTurn", with_gpus(2), {cuda, 5, {}, true}, cuda, 5, {a, b, a, b, a}},
      Choice{"NamedTwice", with_gpus(2), {cuda, each, {"0", "0"}, true}, cuda, 2, {a, a}},
      Choice{"RoomForAResize", with_gpus(4), {cuda, 2, {}, false, 3}, cuda, 2, {a, b, c}},
      Choice{
          "ListWithRoomForAResize", with_gpus(4), {cuda, 2, {"3", "1", "0"}, false, 3}, cuda, 2, {d, b, a}},
      Choice{"ResizeThatShares", with_gpus(2), {cuda, 2, {}, true, 4}, cuda, 2, {a, b, a, b}},
      Choice{"EveryGpuThatIsFree", with_taken_gpus(1, 3), {automatic}, cuda, 2, {b, c}},
      Choice{"FreeGpuThatIsNamedByItsNumber", with_taken_gpus(1, 3), {cuda, each, {"2"}}, cuda, 1, {c}},
      Choice{"TakenGpusThatAreShared", with_taken_gpus(2, 2), {cuda, 2, {}, true}, cuda, 2, {a, b}},
      Choice{"WholeGpusAndSlices", with_slices(), {automatic}, cuda, 3, {a, s1, s2}},
      Choice{"SlicesThatAreNamed", with_slices(), {cuda, each, {"MIG-dd2", "1"}}, cuda, 2, {s2, s1}},
      Choice{"CpuBesideATakenGpu", with_taken_gpus(1, 1), {automatic, each, {"cpu"}}, cpu, 1},
      Choice{"CpuWithoutGpus", with_gpus(0), {automatic}, cpu, 2},
      Choice{"CpuWithoutGpusAsManyAsAreAskedFor", with_gpus(0), {automatic, 5}, cpu, 5},
      Choice{"CpuThatIsNamed", with_gpus(2), {automatic, each, {"cpu", "cpu", "cpu"}}, cpu, 3},
      Choice{"CpuThatIsNamedWithoutGpus", with_gpus(0), {automatic, each, {"cpu"}}, cpu, 1},
      Choice{"ChipsForModelsOfPython", with_chips(4), {automatic, each, {}, false, 0, "python"}, xla, 4},
      Choice{"SomeChips", with_chips(4), {automatic, 2, {}, false, 0, "python"}, xla, 2},
      Choice{"NoChipsForOtherModels", with_chips(4), {automatic}, cpu, 2},
      Choice{"EachChip", with_chips(8), {xla, each, {}, false, 0, "python"}, xla, 8},
      Choice{"TheCpuOfXlaWithoutChips", with_gpus(2), {xla, each, {}, false, 0, "python"}, xla, 2},
      Choice{"Accelerators", with_gpus(1), {accelerator, 3}, accelerator, 3},
      Choice{"AcceleratorsAreNotCounted", with_gpus(1), {accelerator, each}, accelerator, 2}};
  for (const auto& choice : choices) expect_chosen(choice);
}

TEST(RefusedDevices, AreNamedWithThoseThatThereAre) {
  const auto expect_refusal = [](const Machine& machine, const Asked& asked, const std::string& key,
                                 const std::vector<std::string>& parts) {
    const auto refused = test::refusal([&] { assign_devices(config_of(asked), machine); });
    EXPECT_TRUE(says(refused, parts));
    EXPECT_EQ(refused.key, key) << refused.text;
  };
  expect_refusal(with_gpus(0), {cuda}, "runners.device",
                 {"runners.device is cuda, but no GPU can be used: the driver is gone"});
  expect_refusal(with_gpus(0), {automatic, each, {"0", "cpu"}}, "runners.devices",
                 {"runners.devices is [0, cpu], but no GPU can be used: the driver is gone"});
  expect_refusal(with_gpus(2), {automatic, 3}, "nprocs",
                 {"nprocs is 3, but 2 GPUs are free; set runners.oversubscribe"});
  expect_refusal(with_taken_gpus(2, 3), {automatic, 2}, "nprocs",
                 {"nprocs is 2, but 1 GPU is free; set runners.oversubscribe"});
  expect_refusal(with_taken_gpus(2, 2), {automatic}, "runners.device",
                 {"runners.device is auto, but other sessions have all GPUs (GPU 0 (T4", "by process 47",
                  "runners.oversubscribe", "cpu"});
  expect_refusal(with_taken_gpus(1, 2), {cuda, each, {"1", "0"}}, "runners.devices",
                 {"names a GPU that another session has: GPU 0 (T4", "by process 47"});
  expect_refusal(with_gpus(1), {cuda, 2}, "nprocs", {"nprocs is 2, but 1 GPU is free"});
  expect_refusal(with_gpus(2), {cuda, 2, {}, false, 3}, "runners.max_runners",
                 {"runners.max_runners is 3, but 2 GPUs are free"});
  expect_refusal(with_gpus(4), {cuda, 2, {"0", "1"}, false, 3}, "runners.max_runners",
                 {"runners.max_runners is 3, but runners.devices has 2 devices"});
  expect_refusal(with_gpus(4), {cuda, 2, {"0", "1", "2"}}, "runners.devices",
                 {"runners.devices has 3 devices", "nprocs is 2"});
  expect_refusal(
      with_gpus(2), {cuda, each, {"1", "GPU-aa20"}}, "runners.devices",
      {"names GPU 1 (T4, 15.0 GiB, compute capability 7.5, GPU-aa20) twice", "runners.oversubscribe"});
  expect_refusal(with_gpus(2), {cuda, each, {"2"}}, "runners.devices",
                 {"names '2', which is none of the visible GPUs", "GPU 0 (T4", "GPU 1 (T4"});
  expect_refusal(with_gpus(2), {cuda, each, {"GPU-cc"}}, "runners.devices", {"names 'GPU-cc'", b});
  expect_refusal(with_slices(), {cuda, each, {"gpu-cc5"}}, "runners.devices",
                 {"names 'gpu-cc5', which is the GPU A100 (GPU-cc50)", "MIG mode is on", "name a slice of it",
                  s1 + " or " + s2, "nvidia-smi -mig 0"});
  expect_refusal(
      with_slices(), {cuda, each, {"GPU-cc60"}}, "runners.devices",
      {"which is the GPU A30 (GPU-cc60)", "it has no slice", "nvidia-smi mig -cgi", "nvidia-smi -mig 0"});
  expect_refusal(with_slices(), {cuda, each, {"MIG-ee"}}, "runners.devices",
                 {"names 'MIG-ee', which is none of the visible GPUs", s1, s2});
  expect_refusal(with_gpus(2), {cuda, each, {"GPU-aa"}}, "runners.devices",
                 {"names 'GPU-aa', which is the beginning of several UUIDs", a, b});
  expect_refusal(with_gpus(1), {cuda, each, {"gpu0"}}, "runners.devices", {"names 'gpu0'", "nor cpu"});
  expect_refusal(with_chips(4), {automatic, 5, {}, false, 0, "python"}, "nprocs",
                 {"nprocs is 5, but this machine has 4 TPU chips"});
}

TEST(Assignment, IsCheckedAgainstOtherCounts) {
  auto config = config_of({cuda});
  config.runners.min_runners = 3;
  EXPECT_EQ(assign_devices(config, with_gpus(3)).config.nprocs, 3);
  EXPECT_THROW(assign_devices(config, with_gpus(2)), ConfigError);
}

TEST(Assignment, IsNeededUnlessTheKindOfTheDeviceAndACountAreGiven) {
  EXPECT_TRUE(leaves_devices_open(config_of({automatic, 2})));
  EXPECT_TRUE(leaves_devices_open(config_of({cuda, 2})));
  EXPECT_TRUE(leaves_devices_open(config_of({xla, each})));
  EXPECT_FALSE(leaves_devices_open(config_of({xla, 2})));
  EXPECT_FALSE(leaves_devices_open(Config{}));
}

TEST(Assignment, SaysWhatEachRankComputesOn) {
  const auto assigned = assign_devices(config_of({cuda, each, {"1", "cpu"}}), with_gpus(2));
  EXPECT_THAT(assigned.ranks, testing::ElementsAre("GPU 1 (T4, 15.0 GiB, compute capability 7.5, GPU-aa20)",
                                                   "the CPU (16 cores)"));
  EXPECT_THAT(assign_devices(config_of({xla, each, {}, false, 0, "python"}), with_gpus(1)).ranks,
              testing::Each("a device of torch_xla, which has no TPU chips here"));
}

TEST(Rank, CanBeInATeamIfItsGpuIsItsOwnAndAnotherRanksIsToo) {
  const auto why = [](const Asked& asked, int rank, NcclUse nccl = NcclUse::automatic) {
    auto config = assign_devices(config_of(asked), with_gpus(3)).config;
    config.runners.nccl = nccl;
    return why_in_no_team(config, rank);
  };
  EXPECT_EQ(why({cuda, each, {"0", "1"}}, 0), "");
  EXPECT_EQ(why({cuda, each, {"0", "cpu", "2"}}, 2), "");
  EXPECT_EQ(why({cuda, 1, {}, false, 2}, 0), "") << "a resize may bring the other";
  EXPECT_THAT(why({cuda, each, {"0", "cpu", "2"}}, 1), HasSubstr("no GPU"));
  EXPECT_THAT(why({cuda, each, {"0", "cpu"}}, 0), HasSubstr("no other rank"));
  EXPECT_THAT(why({cuda, each, {"0", "1"}}, 0, NcclUse::off), HasSubstr("runners.nccl is off"));
  EXPECT_THAT(why({cuda, each, {"0", "1", "0"}, true}, 2), HasSubstr("shares its GPU"));
  EXPECT_THAT(why({cuda, each, {"0", "1", "0"}, true}, 1), HasSubstr("no other rank"));
  EXPECT_THAT(why_in_no_team(Config{}, 0), HasSubstr("no GPU"));
  Config sliced;
  sliced.runners.nccl = NcclUse::automatic;
  sliced.runners.devices = {"MIG-1", "MIG-2"};
  EXPECT_THAT(why_in_no_team(sliced, 0), HasSubstr("slice"));
}

}  // namespace
}  // namespace accelmgr::device
