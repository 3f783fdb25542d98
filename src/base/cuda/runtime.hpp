// The functions of the CUDA runtime that the transport calls, as a table. load_cuda_runtime() fills it from
// the library (cuda_runtime.hpp); a test fills it with a fake. Nothing here needs CUDA's headers:
// cuda_headers.cpp compares types and numbers with them wherever they are installed.
#pragma once

#include <cstddef>

// CUDA's own names of what a stream and an event point to.
struct CUstream_st;
struct CUevent_st;

namespace accelmgr::device {

using StreamHandle = CUstream_st*;  ///< cudaStream_t
using EventHandle = CUevent_st*;    ///< cudaEvent_t
using Code = int;                   ///< cudaError_t

namespace code {
inline constexpr Code success = 0;
inline constexpr Code invalid_value = 1;
inline constexpr Code out_of_memory = 2;
inline constexpr Code not_ready = 600;
inline constexpr Code illegal_address = 700;
}  // namespace code

/// cudaMemcpyKind
enum class Direction : int { to_device = 1, to_host = 2, on_device = 3 };

inline constexpr unsigned stream_non_blocking = 1;   ///< cudaStreamNonBlocking
inline constexpr unsigned event_without_timing = 2;  ///< cudaEventDisableTiming
inline constexpr unsigned event_of_a_graph = 1;      ///< cudaEventRecordExternal
inline constexpr unsigned register_read_write = 0;   ///< cudaHostRegisterDefault
inline constexpr unsigned register_read_only = 8;    ///< cudaHostRegisterReadOnly
inline constexpr unsigned host_default = 0;          ///< cudaHostAllocDefault

/// Each member has the contract of the function that its comment names.
struct Runtime {
  Code (*set_device)(int device);                                        ///< cudaSetDevice
  Code (*pci_bus_id)(char* text, int size, int device);                  ///< cudaDeviceGetPCIBusId
  Code (*stream_create)(StreamHandle* stream, unsigned flags);           ///< cudaStreamCreateWithFlags
  Code (*stream_destroy)(StreamHandle stream);                           ///< cudaStreamDestroy
  Code (*stream_wait_event)(StreamHandle, EventHandle, unsigned flags);  ///< cudaStreamWaitEvent
  Code (*event_create)(EventHandle* event, unsigned flags);              ///< cudaEventCreateWithFlags
  Code (*event_destroy)(EventHandle event);                              ///< cudaEventDestroy
  Code (*event_record)(EventHandle event, StreamHandle stream);          ///< cudaEventRecord
  /// cudaEventRecordWithFlags
  Code (*event_record_with_flags)(EventHandle event, StreamHandle stream, unsigned flags);
  Code (*event_query)(EventHandle event);  ///< cudaEventQuery
  /// cudaMemcpyAsync
  Code (*copy)(void* to, const void* from, std::size_t bytes, Direction direction, StreamHandle stream);
  Code (*fill)(void* memory, int byte, std::size_t bytes, StreamHandle stream);  ///< cudaMemsetAsync
  Code (*host_register)(void* memory, std::size_t bytes, unsigned flags);        ///< cudaHostRegister
  Code (*host_unregister)(void* memory);                                         ///< cudaHostUnregister
  Code (*host_allocate)(void** memory, std::size_t bytes, unsigned flags);       ///< cudaHostAlloc
  Code (*host_free)(void* memory);                                               ///< cudaFreeHost
  Code (*allocate)(void** memory, std::size_t bytes);                            ///< cudaMalloc
  Code (*free)(void* memory);                                                    ///< cudaFree
  Code (*last_error)();                                                          ///< cudaGetLastError
  const char* (*error_name)(Code code);                                          ///< cudaGetErrorName
  const char* (*error_text)(Code code);                                          ///< cudaGetErrorString
};

}  // namespace accelmgr::device
