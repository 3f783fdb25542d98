// Compares what runtime.hpp and cuda_driver.hpp say with CUDA's headers. CMake compiles this file where they
// are installed; it has no code.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <type_traits>

#include "base/cuda/cuda_driver.hpp"
#include "base/cuda/plain_function.hpp"
#include "base/cuda/runtime.hpp"

namespace accelmgr::device {
namespace {

// The calling convention does not tell an enumeration of int's size from int.
static_assert(sizeof(cudaError_t) == sizeof(Code) && sizeof(cudaMemcpyKind) == sizeof(Direction));
static_assert(std::is_same_v<cudaStream_t, StreamHandle> && std::is_same_v<cudaEvent_t, EventHandle>);
static_assert(cudaSuccess == code::success && cudaErrorInvalidValue == code::invalid_value &&
              cudaErrorMemoryAllocation == code::out_of_memory && cudaErrorNotReady == code::not_ready &&
              cudaErrorIllegalAddress == code::illegal_address);
static_assert(cudaMemcpyHostToDevice == int(Direction::to_device) &&
              cudaMemcpyDeviceToHost == int(Direction::to_host) &&
              cudaMemcpyDeviceToDevice == int(Direction::on_device));
static_assert(cudaStreamNonBlocking == stream_non_blocking &&
              cudaEventDisableTiming == event_without_timing && cudaEventRecordExternal == event_of_a_graph);
static_assert(cudaHostRegisterDefault == register_read_write &&
              cudaHostRegisterReadOnly == register_read_only && cudaHostAllocDefault == host_default);

static_assert(sizeof(CUresult) == sizeof(int) && sizeof(CUdevice_attribute) == sizeof(int));
static_assert(sizeof(CUuuid) == sizeof(DriverUuid));
static_assert(CUDA_SUCCESS == CudaDriver::success &&
              CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR == CudaDriver::major_attribute &&
              CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR == CudaDriver::minor_attribute);

struct PlainCuda {
  static Code of(cudaError_t);
  static Direction of(cudaMemcpyKind);
  static int of(CUresult);
  static int of(CUdevice_attribute);
  static DriverUuid* of(CUuuid*);
  template <class T>
  static T of(T);
};
#define COMPARE(table, member, function) \
  static_assert(is_plain<PlainCuda, decltype(&table::member), decltype(function)>);
#define COMPARE_RUNTIME(result, member, function, parameters) COMPARE(Runtime, member, function)
#define COMPARE_DRIVER(result, member, function, parameters) COMPARE(CudaDriver, member, function)
ACCELMGR_CUDA_RUNTIME(COMPARE_RUNTIME)
ACCELMGR_CUDA_DRIVER(COMPARE_DRIVER)
COMPARE(CudaDriver, device_get_uuid, cuDeviceGetUuid)

}  // namespace
}  // namespace accelmgr::device
