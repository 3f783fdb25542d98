// Stands in for NVIDIA's driver library, libcuda.so.1: it lists the GPUs of fake_machine.hpp and does nothing
// else. It behaves as variables of the environment say. As the real one does, it hides what
// CUDA_VISIBLE_DEVICES hides, and shows one slice (MIG) at most, and no GPU beside it. That the real one
// gives these answers, it cannot prove.
//
//   FAKE_DRIVER_FAILS  code that cuInit returns, or name of another function, which then returns 999
//   FAKE_DRIVER_HANGS  cuInit does not return
//   FAKE_DRIVER_CRASHES  cuInit ends the process by SIGSEGV
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "base/cuda/cuda_driver.hpp"
#include "fake_machine.hpp"

using accelmgr::device::DriverUuid;
using accelmgr::test::FakeDevice;
using accelmgr::test::gpu_count;
using accelmgr::test::usable;

namespace {

constexpr int not_initialized = 3, no_device = 100, unknown = 999;

bool is_initialized = false;

bool is_set(const char* name) { return std::getenv(name) != nullptr; }

int fails(const char* function) {
  const char* failing = std::getenv("FAKE_DRIVER_FAILS");
  return failing != nullptr && std::strcmp(failing, function) == 0 ? unknown : 0;
}

/// The first device that an entry of CUDA_VISIBLE_DEVICES names: by the GPU's number, or by the beginning of
/// a UUID, of a GPU with slices too.
std::vector<FakeDevice> named(const std::string& entry) {
  for (int gpu = 0; gpu < gpu_count(); ++gpu) {
    const bool is_gpu = entry == std::to_string(gpu) || FakeDevice{gpu}.uuid_text().starts_with(entry);
    for (const auto& device : usable(gpu))
      if (is_gpu || device.uuid_text().starts_with(entry)) return {device};
  }
  return {};
}

std::vector<FakeDevice> visible() {
  std::vector<FakeDevice> devices;
  if (const char* list = std::getenv("CUDA_VISIBLE_DEVICES"); list == nullptr) {
    for (int gpu = 0; gpu < gpu_count(); ++gpu)
      for (const auto& device : usable(gpu)) devices.push_back(device);
  } else {
    for (const auto& entry : accelmgr::base::split(list, ',')) {
      const auto device = entry.empty() ? std::vector<FakeDevice>{} : named(entry);
      if (device.empty()) break;  // What follows an unknown one is hidden too.
      devices.push_back(device.front());
    }
  }
  for (const auto& device : devices)
    if (device.slice != FakeDevice::whole) return {device};
  return devices;
}

}  // namespace

extern "C" {
int cuInit(unsigned) {
  while (is_set("FAKE_DRIVER_HANGS")) pause();
  if (is_set("FAKE_DRIVER_CRASHES")) {
    signal(SIGSEGV, SIG_DFL);
    raise(SIGSEGV);
  }
  if (const char* code = std::getenv("FAKE_DRIVER_FAILS"); code != nullptr && std::atoi(code) != 0)
    return std::atoi(code);
  is_initialized = !visible().empty();
  return is_initialized ? 0 : no_device;
}
int cuDeviceGetCount(int* count) {
  if (!is_initialized) return not_initialized;
  *count = static_cast<int>(visible().size());
  return fails("cuDeviceGetCount");
}
int cuDeviceGet(int* device, int ordinal) {
  *device = visible().at(static_cast<std::size_t>(ordinal)).number();
  return fails("cuDeviceGet");
}
int cuDeviceGetName(char* name, int bytes, int device) {
  std::snprintf(name, static_cast<std::size_t>(bytes), "%s", FakeDevice::of(device).name().c_str());
  return fails("cuDeviceGetName");
}
int cuDeviceGetUuid_v2(DriverUuid* uuid, int device) {
  const auto bytes = FakeDevice::of(device).uuid();
  std::memcpy(uuid->bytes, bytes.data(), bytes.size());
  return fails("cuDeviceGetUuid");
}
int cuDeviceTotalMem_v2(std::size_t* bytes, int device) {
  *bytes = FakeDevice::of(device).memory_bytes();
  return fails("cuDeviceTotalMem");
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : -1;
  return fails("cuDeviceGetAttribute");
}
int cuGetErrorName(int code, const char** name) {
  *name = code == no_device ? "CUDA_ERROR_NO_DEVICE" : code == unknown ? "CUDA_ERROR_UNKNOWN" : nullptr;
  return *name == nullptr ? 1 : 0;
}
int cuGetErrorString(int code, const char** text) {
  *text = code == no_device ? "no CUDA-capable device is detected" : "a text";
  return code == no_device || code == unknown ? 0 : 1;
}
}
