// Tests of the kinds of devices by their backends, and of the devices that an environment leaves visible.
#include "launcher/launch/plan/devices.hpp"

#include "launcher/launch/nodes.hpp"
#include "launcher/launch/plan/resolution.hpp"

namespace accelmgr::launch {
namespace {

using Ids = std::vector<std::string>;

TEST(DeviceKinds, AreFoundByTheirBackends) {
  EXPECT_EQ(device_kind_of_backend("nccl"), &device_kind("gpu"));
  EXPECT_EQ(device_kind_of_backend("bkcl"), &device_kind("xpu"));
  EXPECT_EQ(device_kind_of_backend("xccl"), &device_kind("custom"));
  for (const auto* backend : {"shm", "gloo", "serial", "auto", ""})
    EXPECT_EQ(device_kind_of_backend(backend), nullptr) << backend;
}

TEST(VisibleGpus, AreThoseThatTheDriverWouldShow) {
  const std::pair<const char*, Ids> rows[] = {{"0,1,2,3", {"0", "1", "2", "3"}},
                                              {"3, 1", {"3", "1"}},
                                              {"", {}},
                                              {"-1", {}},
                                              {"2,-1,3", {"2"}},
                                              {"0,4,1", {"0"}},
                                              {"1,,2", {"1"}},
                                              {"GPU-8932f937,MIG-1", {"GPU-8932f937", "MIG-1"}}};
  for (const auto& [list, ids] : rows) {
    const auto node_info = gpu_node(4, {{"CUDA_VISIBLE_DEVICES", list}});
    EXPECT_EQ(visible_devices(device_kind("gpu"), node_info), ids) << list;
    EXPECT_EQ(visible_source(device_kind("gpu"), node_info), "environment CUDA_VISIBLE_DEVICES");
  }
  EXPECT_EQ(visible_devices(device_kind("gpu"), gpu_node(2)), (Ids{"0", "1"}));
  EXPECT_EQ(visible_source(device_kind("gpu"), gpu_node(2)), "default: 2 GPUs");
  EXPECT_EQ(visible_devices(device_kind("gpu"), cpu_node(2)), Ids{});
  EXPECT_EQ(visible_devices(device_kind("gpu"), cpu_node(2, {{"CUDA_VISIBLE_DEVICES", "GPU-8932f937"}})),
            Ids{});
}

}  // namespace
}  // namespace accelmgr::launch
