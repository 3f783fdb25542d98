// Stands in for NVIDIA's management library, libnvidia-ml.so.1, beside fake_driver.cpp: it lists the GPUs of
// fake_machine.hpp and all their slices, whatever CUDA_VISIBLE_DEVICES hides, as the real one does. That the
// real one gives these answers, it cannot prove.
//
//   FAKE_NVML_FAILS  name of a function, which then returns 999
#include <cstdint>
#include <cstring>
#include <string>

#include "base/cuda/nvml.hpp"
#include "fake_machine.hpp"

namespace {

using accelmgr::device::NvmlDevice;
using accelmgr::device::NvmlMemory;
using accelmgr::test::FakeDevice;

constexpr int not_supported = 3, not_found = 6, too_small = 7, unknown = 999;
bool is_ready = false;

int result(const char* function) {
  if (!is_ready) return 1;  // NVML_ERROR_UNINITIALIZED
  return accelmgr::test::variable("FAKE_NVML_FAILS") == function ? unknown : 0;
}

/// A handle is the device's number and 1, as no handle is null.
NvmlDevice handle_of(FakeDevice device) {
  return reinterpret_cast<NvmlDevice>(static_cast<std::uintptr_t>(device.number()) + 1);  // NOLINT
}

FakeDevice device_of(NvmlDevice handle) {
  return FakeDevice::of(static_cast<int>(reinterpret_cast<std::uintptr_t>(handle)) - 1);
}

int copy(const std::string& text, char* to, unsigned bytes) {
  if (text.size() >= bytes) return too_small;
  std::memcpy(to, text.c_str(), text.size() + 1);
  return 0;
}

}  // namespace

extern "C" {
int nvmlInit_v2() {
  is_ready = true;
  return result("nvmlInit_v2");
}
int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = static_cast<unsigned>(accelmgr::test::gpu_count());
  return result("nvmlDeviceGetCount_v2");
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, NvmlDevice* device) {
  *device = handle_of({static_cast<int>(index)});
  return result("nvmlDeviceGetHandleByIndex_v2");
}
int nvmlDeviceGetMigMode(NvmlDevice device, unsigned* current, unsigned* pending) {
  const int slices = accelmgr::test::slice_count(device_of(device).gpu);
  *current = *pending = slices < 0 ? 0 : 1;
  return device_of(device).gpu > 1 && slices < 0 ? not_supported : result("nvmlDeviceGetMigMode");
}
int nvmlDeviceGetMaxMigDeviceCount(NvmlDevice, unsigned* count) {
  *count = FakeDevice::most_slices;
  return result("nvmlDeviceGetMaxMigDeviceCount");
}
/// The first index has no slice: indices have gaps.
int nvmlDeviceGetMigDeviceHandleByIndex(NvmlDevice device, unsigned index, NvmlDevice* slice) {
  const auto gpu = device_of(device).gpu;
  const int number = static_cast<int>(index) - 1;
  if (number < 0 || number >= accelmgr::test::slice_count(gpu)) return not_found;
  *slice = handle_of({gpu, number});
  return result("nvmlDeviceGetMigDeviceHandleByIndex");
}
int nvmlDeviceGetName(NvmlDevice device, char* name, unsigned bytes) {
  const int copied = copy(device_of(device).name(), name, bytes);
  return copied != 0 ? copied : result("nvmlDeviceGetName");
}
int nvmlDeviceGetUUID(NvmlDevice device, char* uuid, unsigned bytes) {
  const int copied = copy(device_of(device).uuid_text(), uuid, bytes);
  return copied != 0 ? copied : result("nvmlDeviceGetUUID");
}
int nvmlDeviceGetMemoryInfo(NvmlDevice device, NvmlMemory* memory) {
  *memory = {.total = device_of(device).memory_bytes(), .free = 0, .used = 0};
  return result("nvmlDeviceGetMemoryInfo");
}
/// Of a whole GPU only.
int nvmlDeviceGetCudaComputeCapability(NvmlDevice device, int* major, int* minor) {
  if (device_of(device).slice != FakeDevice::whole) return not_supported;
  *major = 9;
  *minor = 0;
  return result("nvmlDeviceGetCudaComputeCapability");
}
}
