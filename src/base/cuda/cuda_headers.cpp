// Compares what runtime.hpp and cuda_driver.hpp say with CUDA's headers. CMake compiles this file where they
// are installed; it has no code.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <type_traits>

#include "base/cuda/cuda_driver.hpp"
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

/// T with CUDA's enumerations and CUuuid as runtime.hpp and cuda_driver.hpp have them.
template <class T>
struct Plain {
  using type = T;
};
template <>
struct Plain<cudaError_t> {
  using type = Code;
};
template <>
struct Plain<cudaMemcpyKind> {
  using type = Direction;
};
template <>
struct Plain<CUresult> {
  using type = int;
};
template <>
struct Plain<CUdevice_attribute> {
  using type = int;
};
template <>
struct Plain<CUuuid*> {
  using type = DriverUuid*;
};
template <class Function>
struct PlainFunction;
template <class Result, class... Arguments>
struct PlainFunction<Result(Arguments...)> {
  using type = typename Plain<Result>::type (*)(typename Plain<Arguments>::type...);
};
template <class T>
struct Member;
template <class Table, class Pointer>
struct Member<Pointer Table::*> {
  using type = Pointer;
};
template <auto member, class Function>
constexpr bool agrees =
    std::is_same_v<typename Member<decltype(member)>::type, typename PlainFunction<Function>::type>;

static_assert(agrees<&Runtime::set_device, decltype(cudaSetDevice)>);
static_assert(agrees<&Runtime::pci_bus_id, decltype(cudaDeviceGetPCIBusId)>);
static_assert(agrees<&Runtime::stream_create, decltype(cudaStreamCreateWithFlags)>);
static_assert(agrees<&Runtime::stream_destroy, decltype(cudaStreamDestroy)>);
static_assert(agrees<&Runtime::event_create, decltype(cudaEventCreateWithFlags)>);
static_assert(agrees<&Runtime::stream_wait_event, decltype(cudaStreamWaitEvent)>);
static_assert(agrees<&Runtime::event_destroy, decltype(cudaEventDestroy)>);
static_assert(agrees<&Runtime::event_record, cudaError_t(cudaEvent_t, cudaStream_t)>);
static_assert(agrees<&Runtime::event_record_with_flags, cudaError_t(cudaEvent_t, cudaStream_t, unsigned)>);
static_assert(agrees<&Runtime::event_query, decltype(cudaEventQuery)>);
static_assert(agrees<&Runtime::copy, decltype(cudaMemcpyAsync)>);
static_assert(agrees<&Runtime::fill, decltype(cudaMemsetAsync)>);
static_assert(agrees<&Runtime::host_register, decltype(cudaHostRegister)>);
static_assert(agrees<&Runtime::host_unregister, decltype(cudaHostUnregister)>);
static_assert(agrees<&Runtime::host_allocate, cudaError_t(void**, std::size_t, unsigned)>);
static_assert(agrees<&Runtime::host_free, decltype(cudaFreeHost)>);
static_assert(agrees<&Runtime::allocate, decltype(cudaMalloc)>);
static_assert(agrees<&Runtime::free, decltype(cudaFree)>);
static_assert(agrees<&Runtime::last_error, decltype(cudaGetLastError)>);
static_assert(agrees<&Runtime::error_name, decltype(cudaGetErrorName)>);
static_assert(agrees<&Runtime::error_text, decltype(cudaGetErrorString)>);

static_assert(agrees<&CudaDriver::init, decltype(cuInit)>);
static_assert(agrees<&CudaDriver::device_get_count, decltype(cuDeviceGetCount)>);
static_assert(agrees<&CudaDriver::device_get, decltype(cuDeviceGet)>);
static_assert(agrees<&CudaDriver::device_get_name, decltype(cuDeviceGetName)>);
static_assert(agrees<&CudaDriver::device_get_uuid, decltype(cuDeviceGetUuid)>);
static_assert(agrees<&CudaDriver::device_total_mem, decltype(cuDeviceTotalMem)>);
static_assert(agrees<&CudaDriver::device_get_attribute, decltype(cuDeviceGetAttribute)>);
static_assert(agrees<&CudaDriver::get_error_name, decltype(cuGetErrorName)>);
static_assert(agrees<&CudaDriver::get_error_string, decltype(cuGetErrorString)>);

}  // namespace
}  // namespace accelmgr::device
