// Stands in for NVIDIA's driver library, libcuda.so.1: it lists GPUs and does nothing else. It behaves as
// variables of the environment say, and hides what CUDA_VISIBLE_DEVICES hides, as the real one does.
//
//   FAKE_DRIVER_GPUS   how many GPUs the machine has; 2 if it is not set
//   FAKE_DRIVER_FAILS  code that cuInit returns, or name of another function, which then returns 999
//   FAKE_DRIVER_HANGS  cuInit does not return
//   FAKE_DRIVER_CRASHES  cuInit ends the process by SIGSEGV
//   FAKE_DRIVER_MACHINE  a number in the UUIDs, in place of their last four bytes: tests that run at the same
//   time
//                        have different GPUs
//   FAKE_DRIVER_SLICES each GPU is a slice of one (MIG)
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "base/cuda/cuda_driver.hpp"

using accelmgr::device::DriverUuid;

namespace {

constexpr int no_device = 100, unknown = 999;

bool is_set(const char* name) { return std::getenv(name) != nullptr; }

int fails(const char* function) {
  const char* failing = std::getenv("FAKE_DRIVER_FAILS");
  return failing != nullptr && std::strcmp(failing, function) == 0 ? unknown : 0;
}

/// The GPUs by their numbers in the machine, as CUDA_VISIBLE_DEVICES orders them.
std::vector<int> visible() {
  const char* given = std::getenv("FAKE_DRIVER_GPUS");
  const int count = given != nullptr ? std::atoi(given) : 2;
  std::vector<int> gpus;
  const char* list = std::getenv("CUDA_VISIBLE_DEVICES");
  if (list == nullptr) {
    for (int i = 0; i < count; ++i) gpus.push_back(i);
    return gpus;
  }
  for (const char* rest = list; *rest != 0;) {
    char* end = nullptr;
    const long number = std::strtol(rest, &end, 10);
    if (end == rest || number < 0 || number >= count) break;  // What follows an unknown one is hidden too.
    gpus.push_back(static_cast<int>(number));
    rest = *end == ',' ? end + 1 : end;
  }
  return gpus;
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
  return visible().empty() ? no_device : 0;
}
int cuDeviceGetCount(int* count) {
  *count = static_cast<int>(visible().size());
  return fails("cuDeviceGetCount");
}
int cuDeviceGet(int* device, int ordinal) {
  *device = visible().at(static_cast<std::size_t>(ordinal));
  return fails("cuDeviceGet");
}
int cuDeviceGetName(char* name, int bytes, int device) {
  std::snprintf(name, static_cast<std::size_t>(bytes), "Fake GPU %c%s", 'A' + device,
                is_set("FAKE_DRIVER_SLICES") ? " MIG 1g.5gb" : "");
  return fails("cuDeviceGetName");
}
int cuDeviceGetUuid_v2(DriverUuid* uuid, int device) {
  for (int i = 0; i < 16; ++i) uuid->bytes[i] = static_cast<char>(0xa0 + 16 * device + i);
  if (const char* machine = std::getenv("FAKE_DRIVER_MACHINE"))
    for (int i = 0; i < 4; ++i) uuid->bytes[12 + i] = static_cast<char>(std::atoi(machine) >> (24 - 8 * i));
  return fails("cuDeviceGetUuid");
}
int cuDeviceTotalMem_v2(std::size_t* bytes, int device) {
  *bytes = static_cast<std::size_t>(device + 1) << 34;
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
