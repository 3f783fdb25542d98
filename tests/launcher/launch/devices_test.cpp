// Tests of the table of device kinds, and of the devices that an environment leaves visible.
#include "launcher/launch/plan/devices.hpp"

#include <ostream>

#include "launcher/launch/nodes.hpp"
#include "launcher/launch/plan/resolution.hpp"

namespace accelmgr::launch {
namespace {

using Ids = std::vector<std::string>;

TEST(DeviceKinds, HaveTheirVariablesAndBackendsInOneTable) {
  const auto row = [](const DeviceKind& kind) {
    return Ids{kind.name, kind.option, kind.visible, kind.selected, kind.flag, kind.backend};
  };
  std::vector<Ids> rows;
  for (const auto& kind : device_kinds()) rows.push_back(row(kind));
  EXPECT_EQ(
      rows,
      (std::vector<Ids>{
          {"cpu", "", "", "", "", "shm"},
          {"gpu", "gpus", "CUDA_VISIBLE_DEVICES", "ACCELMGR_SELECTED_GPUS", "FLAGS_selected_gpus", "nccl"},
          {"xpu", "xpus", "XPU_VISIBLE_DEVICES", "ACCELMGR_SELECTED_XPUS", "FLAGS_selected_xpus", "bkcl"},
          {"custom", "", "ACCELMGR_SELECTED_CUSTOMS", "ACCELMGR_SELECTED_CUSTOMS", "", "xccl"}}));
}

TEST(DeviceKinds, WithoutADriverHaveNoDevices) {
  for (const auto& kind : device_kinds())
    if (kind.devices == nullptr) {
      EXPECT_EQ(kind.count(gpu_node(4)), 0) << kind.name;
    }
}

TEST(DeviceKinds, AreFoundByTheirBackends) {
  EXPECT_EQ(device_kind_of_backend("nccl"), &device_kind("gpu"));
  EXPECT_EQ(device_kind_of_backend("bkcl"), &device_kind("xpu"));
  EXPECT_EQ(device_kind_of_backend("xccl"), &device_kind("custom"));
  for (const auto* backend : {"shm", "gloo", "serial", "auto", ""})
    EXPECT_EQ(device_kind_of_backend(backend), nullptr) << backend;
}

struct Visible {
  std::string list;
  Ids ids;
};

void PrintTo(const Visible& v, std::ostream* out) { *out << "'" << v.list << "'"; }

class VisibleGpus : public ::testing::TestWithParam<Visible> {};

TEST_P(VisibleGpus, AreThoseThatTheDriverWouldShow) {
  const auto node_info = gpu_node(4, {{"CUDA_VISIBLE_DEVICES", GetParam().list}});
  EXPECT_EQ(visible_devices(device_kind("gpu"), node_info), GetParam().ids);
  EXPECT_EQ(visible_source(device_kind("gpu"), node_info), "environment CUDA_VISIBLE_DEVICES");
}

INSTANTIATE_TEST_SUITE_P(Launch, VisibleGpus,
                         ::testing::Values(Visible{"0,1,2,3", {"0", "1", "2", "3"}},
                                           Visible{"3, 1", {"3", "1"}}, Visible{"", {}}, Visible{"-1", {}},
                                           Visible{"2,-1,3", {"2"}}, Visible{"0,4,1", {"0"}},
                                           Visible{"1,,2", {"1"}},
                                           Visible{"GPU-8932f937,MIG-1", {"GPU-8932f937", "MIG-1"}}));

TEST(VisibleGpus, AreAllWithoutTheVariable) {
  EXPECT_EQ(visible_devices(device_kind("gpu"), gpu_node(2)), (Ids{"0", "1"}));
  EXPECT_EQ(visible_source(device_kind("gpu"), gpu_node(2)), "default: 2 GPUs");
  EXPECT_EQ(visible_devices(device_kind("gpu"), cpu_node(2)), Ids{});
}

TEST(VisibleGpus, AreNoneWhereThereAreNone) {
  EXPECT_EQ(visible_devices(device_kind("gpu"), cpu_node(2, {{"CUDA_VISIBLE_DEVICES", "GPU-8932f937"}})),
            Ids{});
}

}  // namespace
}  // namespace accelmgr::launch
