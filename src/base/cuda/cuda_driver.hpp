// The functions of NVIDIA's driver library that list GPUs, as a table without CUDA's headers. The types are
// those of cuda.h. They load a driver that survives no fork into the process, so only the short-lived child
// of list_gpus() calls them.
#pragma once

#include <cstddef>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "base/cuda/runtime.hpp"

namespace accelmgr::device {

/// CUuuid.
struct DriverUuid {
  char bytes[16];
};

/// A table as in runtime.hpp, with all functions that have one name in every driver.
#define ACCELMGR_CUDA_DRIVER(X)                                                               \
  X(int, init, cuInit, (unsigned flags))                                                      \
  X(int, device_get_count, cuDeviceGetCount, (int* count))                                    \
  X(int, device_get, cuDeviceGet, (int* device, int ordinal))                                 \
  X(int, device_get_name, cuDeviceGetName, (char* name, int bytes, int device))               \
  X(int, device_total_mem, cuDeviceTotalMem_v2, (std::size_t * bytes, int device))            \
  X(int, device_get_attribute, cuDeviceGetAttribute, (int* value, int attribute, int device)) \
  X(int, get_error_name, cuGetErrorName, (int code, const char** name))                       \
  X(int, get_error_string, cuGetErrorString, (int code, const char** text))

struct CudaDriver {
  static constexpr int success = 0;
  static constexpr int major_attribute = 75;  ///< CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
  static constexpr int minor_attribute = 76;

  ACCELMGR_CUDA_DRIVER(ACCELMGR_DECLARE_MEMBER)
  /// The second version of this function: for a slice of a GPU (MIG) it gives the slice's UUID, not the
  /// GPU's.
  int (*device_get_uuid)(DriverUuid* uuid, int device);
};

/// Asks the driver in `library` for all GPUs that CUDA_VISIBLE_DEVICES leaves. Returns either "gpus", a list
/// of objects with "name", "memory_bytes", "uuid", "major" and "minor", or "problem", why there are none, as
/// text. The text also says which device nodes are below `root`/dev. Loads the library into this process for
/// good, and may block for as long as the driver does.
nlohmann::json ask_driver(const std::string& library, const std::filesystem::path& root);

}  // namespace accelmgr::device
