#include "gpu_device.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <array>

#include "accelmgr/errors.hpp"
#include "base/cuda/cuda_runtime.hpp"

namespace accelmgr::bench {
namespace {

/// A function of a library that this process has loaded. Null if the library or the function is not there.
template <class Function>
Function* loaded(const char* library, const char* name) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
  return handle == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(handle, name));
}

template <class Function>
Function* of_runtime(const char* name) {
  for (const char* library : {"libcudart.so.13", "libcudart.so.12"})
    if (auto* function = loaded<Function>(library, name)) return function;
  throw UsageError(fmt::format("CUDA's runtime library has no {}", name));
}

int version(const char* function) {
  int value = 0;
  of_runtime<device::Code(int*)>(function)(&value);
  return value;
}

bool is_fake() { return loaded<int>("libcudart.so.13", "accelmgr_fake_cuda") != nullptr; }

/// The name of device 0, from the driver.
std::string device_name() {
  auto* get = loaded<device::Code(int*, int)>("libcuda.so.1", "cuDeviceGet");
  auto* get_name = loaded<device::Code(char*, int, int)>("libcuda.so.1", "cuDeviceGetName");
  int device = 0;
  std::array<char, 256> name{};
  if (get == nullptr || get_name == nullptr || get(&device, 0) != 0 ||
      get_name(name.data(), int(name.size()) - 1, device) != 0)
    return "unknown";
  return name.data();
}

}  // namespace

Gpu open_gpu() {
  const auto runtime = device::load_cuda_runtime(device::cuda_runtime_candidates({}));
  int count = 0;
  const auto code = of_runtime<device::Code(int*)>("cudaGetDeviceCount")(&count);
  if (code != device::code::success || count == 0)
    throw UsageError(fmt::format("cudaGetDeviceCount: {}", runtime.error_text(code)));
  runtime.set_device(0);
  return {.runtime = runtime,
          .name = is_fake() ? "fake" : device_name(),
          .driver_version = version("cudaDriverGetVersion"),
          .runtime_version = version("cudaRuntimeGetVersion")};
}

}  // namespace accelmgr::bench
