// The functions of NVIDIA's management library (NVML) that list GPUs and their slices (MIG), as a table
// without its header. NVML lists all of them, where the CUDA driver shows a process one slice at most.
// nvml_header.cpp compares types and numbers with the header wherever it is installed.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "base/cuda/runtime.hpp"

struct nvmlDevice_st;  // NVML's own name of what a device points to.

namespace accelmgr::device {

using NvmlDevice = nvmlDevice_st*;  ///< nvmlDevice_t: a GPU, or a slice of one.

/// nvmlMemory_t
struct NvmlMemory {
  unsigned long long total, free, used;
};

/// A table as in runtime.hpp. Each function returns a code.
#define ACCELMGR_NVML(X)                                                                                \
  X(int, init, nvmlInit_v2, ())                                                                         \
  X(int, device_get_count, nvmlDeviceGetCount_v2, (unsigned* count))                                    \
  X(int, device_get_handle, nvmlDeviceGetHandleByIndex_v2, (unsigned index, NvmlDevice* device))        \
  X(int, device_get_mig_mode, nvmlDeviceGetMigMode, (NvmlDevice, unsigned* current, unsigned* pending)) \
  X(int, device_get_most_slices, nvmlDeviceGetMaxMigDeviceCount, (NvmlDevice, unsigned* count))         \
  X(int, device_get_slice, nvmlDeviceGetMigDeviceHandleByIndex,                                         \
    (NvmlDevice, unsigned index, NvmlDevice* slice))                                                    \
  X(int, device_get_name, nvmlDeviceGetName, (NvmlDevice device, char* name, unsigned bytes))           \
  X(int, device_get_uuid, nvmlDeviceGetUUID, (NvmlDevice device, char* uuid, unsigned bytes))           \
  X(int, device_get_memory, nvmlDeviceGetMemoryInfo, (NvmlDevice device, NvmlMemory * memory))          \
  X(int, device_get_compute_capability, nvmlDeviceGetCudaComputeCapability,                             \
    (NvmlDevice device, int* major, int* minor))

struct Nvml {
  static constexpr int success = 0;
  static constexpr unsigned mig_enabled = 1;  ///< NVML_DEVICE_MIG_ENABLE
  static constexpr unsigned text_bytes = 96;  ///< NVML_DEVICE_NAME_V2_BUFFER_SIZE, and that of UUIDs.

  ACCELMGR_NVML(ACCELMGR_DECLARE_MEMBER)
};

/// Asks the NVML in `library` for the GPUs of this machine; it does not read CUDA_VISIBLE_DEVICES. Returns a
/// list of objects with "name", "memory_bytes", "uuid", "major" and "minor", as ask_driver() does, and with
/// "is_sliced", whether the MIG mode is on, and "slices", a list of such objects. Returns null if the library
/// is absent, older than slices, or fails. GPUs and slices that this process may not see are left out. Loads
/// the library into this process for good, and may block for as long as the driver does.
nlohmann::json ask_nvml(const std::string& library);

}  // namespace accelmgr::device
