// Compares what nvml.hpp says with NVML's header. CMake compiles this file where it is installed; it has no
// code.
#include <nvml.h>

#include <type_traits>

#include "base/cuda/nvml.hpp"
#include "base/cuda/plain_function.hpp"

namespace accelmgr::device {
namespace {

// The calling convention does not tell an enumeration of int's size from int.
static_assert(sizeof(nvmlReturn_t) == sizeof(int) && std::is_same_v<nvmlDevice_t, NvmlDevice>);
static_assert(sizeof(nvmlMemory_t) == sizeof(NvmlMemory) &&
              offsetof(nvmlMemory_t, total) == offsetof(NvmlMemory, total));
static_assert(NVML_SUCCESS == Nvml::success && NVML_DEVICE_MIG_ENABLE == Nvml::mig_enabled);
static_assert(NVML_DEVICE_NAME_V2_BUFFER_SIZE <= Nvml::text_bytes &&
              NVML_DEVICE_UUID_V2_BUFFER_SIZE <= Nvml::text_bytes);

struct PlainNvml {
  static int of(nvmlReturn_t);
  static NvmlMemory* of(nvmlMemory_t*);
  template <class T>
  static T of(T);
};
#define COMPARE(result, member, function, parameters) \
  static_assert(is_plain<PlainNvml, decltype(&Nvml::member), decltype(function)>);
ACCELMGR_NVML(COMPARE)

}  // namespace
}  // namespace accelmgr::device
