#include "launcher/launch/plan/devices.hpp"

#include <algorithm>
#include <stdexcept>

#include "launcher/launch/compat/variables.hpp"

namespace accelmgr::launch {

std::span<const DeviceKind> device_kinds() {
  static const std::vector<DeviceKind> kinds = {
      {.name = "cpu", .label = "CPU", .backend = "shm", .devices = &NodeInfo::cores},
      {.name = "gpu",
       .label = "GPU",
       .backend = "nccl",
       .option = "gpus",
       .visible = "CUDA_VISIBLE_DEVICES",
       .selected = variable::selected_gpus,
       .flag = variable::flag_gpus,
       .devices = &NodeInfo::gpus},
      {.name = "xpu",
       .label = "XPU",
       .backend = "bkcl",
       .option = "xpus",
       .visible = "XPU_VISIBLE_DEVICES",
       .selected = variable::selected_xpus,
       .flag = variable::flag_xpus},
      {.name = "custom",
       .label = "CUSTOM",
       .backend = "xccl",
       .visible = variable::selected_customs,
       .selected = variable::selected_customs},
  };
  return kinds;
}

const DeviceKind& device_kind(std::string_view name) {
  const auto kinds = device_kinds();
  const auto found = std::ranges::find(kinds, name, &DeviceKind::name);
  if (found == kinds.end()) throw std::logic_error("no kind of devices is called " + std::string(name));
  return *found;
}

const DeviceKind* device_kind_of_backend(std::string_view backend) {
  const auto kinds = device_kinds();
  const auto found = std::ranges::find(kinds, backend, &DeviceKind::backend);
  return found == kinds.end() || found->visible.empty() ? nullptr : &*found;
}

}  // namespace accelmgr::launch
