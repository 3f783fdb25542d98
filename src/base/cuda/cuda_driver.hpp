// The functions of NVIDIA's driver library that list GPUs, as a table without CUDA's headers. The types are
// those of cuda.h. A process that has called them has a driver in it that survives no fork: only the short
// child of list_gpus() does.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>

namespace accelmgr::device {

/// CUuuid.
struct DriverUuid {
  char bytes[16];
};

struct CudaDriver {
  static constexpr int success = 0;
  static constexpr int major_attribute = 75;  ///< CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
  static constexpr int minor_attribute = 76;

  int (*init)(unsigned flags);
  int (*device_get_count)(int* count);
  int (*device_get)(int* device, int ordinal);
  int (*device_get_name)(char* name, int bytes, int device);
  /// The second version: of a slice of a GPU (MIG) it says the slice's own, not its GPU's.
  int (*device_get_uuid)(DriverUuid* uuid, int device);
  int (*device_total_mem)(std::size_t* bytes, int device);
  int (*device_get_attribute)(int* value, int attribute, int device);
  int (*get_error_name)(int code, const char** name);
  int (*get_error_string)(int code, const char** text);
};

/// Asks the driver in `library` for all GPUs that CUDA_VISIBLE_DEVICES leaves. Returns JSON: either "gpus", a
/// list of objects with "name", "memory_bytes", "uuid", "major" and "minor", or "problem", why there are
/// none, as text. The text also says which device nodes are below `root`/dev. Loads the library into this
/// process for good, and may block for as long as the driver does.
std::string ask_driver(const std::string& library, const std::filesystem::path& root);

}  // namespace accelmgr::device
