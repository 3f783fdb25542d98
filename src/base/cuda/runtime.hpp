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

/// Declares a function of a table. A table is a list of X(result, member, function of the library,
/// parameters), and a structure of the members; each has the contract of its function.
// NOLINTNEXTLINE(bugprone-macro-parentheses): a declaration takes no parentheses there.
#define ACCELMGR_DECLARE_MEMBER(result, member, function, parameters) result(*member) parameters;

#define ACCELMGR_CUDA_RUNTIME(X)                                                                           \
  X(Code, set_device, cudaSetDevice, (int device))                                                         \
  X(Code, pci_bus_id, cudaDeviceGetPCIBusId, (char* text, int size, int device))                           \
  X(Code, stream_create, cudaStreamCreateWithFlags, (StreamHandle*, unsigned flags))                       \
  X(Code, stream_destroy, cudaStreamDestroy, (StreamHandle stream))                                        \
  X(Code, stream_wait_event, cudaStreamWaitEvent, (StreamHandle, EventHandle, unsigned flags))             \
  X(Code, event_create, cudaEventCreateWithFlags, (EventHandle*, unsigned flags))                          \
  X(Code, event_destroy, cudaEventDestroy, (EventHandle event))                                            \
  X(Code, event_record, cudaEventRecord, (EventHandle event, StreamHandle stream))                         \
  X(Code, event_record_with_flags, cudaEventRecordWithFlags, (EventHandle, StreamHandle, unsigned flags))  \
  X(Code, event_query, cudaEventQuery, (EventHandle event))                                                \
  X(Code, copy, cudaMemcpyAsync, (void* to, const void* from, std::size_t bytes, Direction, StreamHandle)) \
  X(Code, fill, cudaMemsetAsync, (void* memory, int byte, std::size_t bytes, StreamHandle stream))         \
  X(Code, host_register, cudaHostRegister, (void* memory, std::size_t bytes, unsigned flags))              \
  X(Code, host_unregister, cudaHostUnregister, (void* memory))                                             \
  X(Code, host_allocate, cudaHostAlloc, (void** memory, std::size_t bytes, unsigned flags))                \
  X(Code, host_free, cudaFreeHost, (void* memory))                                                         \
  X(Code, allocate, cudaMalloc, (void** memory, std::size_t bytes))                                        \
  X(Code, free, cudaFree, (void* memory))                                                                  \
  X(Code, last_error, cudaGetLastError, ())                                                                \
  X(const char*, error_name, cudaGetErrorName, (Code code))                                                \
  X(const char*, error_text, cudaGetErrorString, (Code code))

struct Runtime {
  ACCELMGR_CUDA_RUNTIME(ACCELMGR_DECLARE_MEMBER)
};

}  // namespace accelmgr::device
