#include "base/cuda/nvml.hpp"

#include <array>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/cuda/shared_library.hpp"

namespace accelmgr::device {
namespace {

using nlohmann::json;

std::optional<Nvml> nvml_functions_of(const std::string& path) {
  SharedLibrary library({}, {path});
  Nvml nvml{};
#define FIND(result, member, function, parameters) library.find(#function, nvml.member);
  ACCELMGR_NVML(FIND)
#undef FIND
  if (!library.why_not().empty() || nvml.init() != Nvml::success) return std::nullopt;
  return nvml;
}

/// What NVML tells of GPUs and slices alike; null if a call fails.
json describe(const Nvml& nvml, NvmlDevice device) {
  std::array<char, Nvml::text_bytes> name{}, uuid{};
  NvmlMemory memory{};
  if (nvml.device_get_name(device, name.data(), Nvml::text_bytes) != Nvml::success ||
      nvml.device_get_uuid(device, uuid.data(), Nvml::text_bytes) != Nvml::success ||
      nvml.device_get_memory(device, &memory) != Nvml::success)
    return nullptr;
  return {{"name", name.data()}, {"uuid", uuid.data()}, {"memory_bytes", memory.total}};
}

json slices_of(const Nvml& nvml, NvmlDevice gpu) {
  json slices = json::array();
  unsigned most = 0;
  if (nvml.device_get_most_slices(gpu, &most) != Nvml::success) most = 0;
  for (unsigned index = 0; index < most; ++index) {
    NvmlDevice slice = nullptr;
    if (nvml.device_get_slice(gpu, index, &slice) != Nvml::success) continue;  // Indices have gaps.
    if (auto described = describe(nvml, slice); !described.is_null()) slices.push_back(std::move(described));
  }
  return slices;
}

json describe_gpu(const Nvml& nvml, unsigned index) {
  NvmlDevice gpu = nullptr;
  int major = 0, minor = 0;
  if (nvml.device_get_handle(index, &gpu) != Nvml::success ||
      nvml.device_get_compute_capability(gpu, &major, &minor) != Nvml::success)
    return nullptr;
  auto described = describe(nvml, gpu);
  if (described.is_null()) return described;
  unsigned mode = 0, pending = 0;  // GPUs without slices do not support the question.
  const bool is_sliced =
      nvml.device_get_mig_mode(gpu, &mode, &pending) == Nvml::success && mode == Nvml::mig_enabled;
  described["is_sliced"] = is_sliced;
  described["slices"] = is_sliced ? slices_of(nvml, gpu) : json::array();
  described["major"] = major;
  described["minor"] = minor;
  for (auto& slice : described["slices"]) slice.update({{"major", major}, {"minor", minor}});
  return described;
}

}  // namespace

json ask_nvml(const std::string& library) {
  const auto nvml = nvml_functions_of(library);
  unsigned count = 0;
  if (!nvml || nvml->device_get_count(&count) != Nvml::success) return nullptr;
  json gpus = json::array();
  for (unsigned index = 0; index < count; ++index)
    if (auto gpu = describe_gpu(*nvml, index); !gpu.is_null()) gpus.push_back(std::move(gpu));
  return gpus;
}

}  // namespace accelmgr::device
