// Stands in for CUDA's runtime library: it has the functions, and they do nothing. With WITHOUT_EVENT_QUERY
// one is missing, as in a library of another kind.
#include "base/cuda/runtime.hpp"

using accelmgr::device::Code;
using accelmgr::device::Direction;
using accelmgr::device::EventHandle;
using accelmgr::device::StreamHandle;

extern "C" {
Code cudaSetDevice(int device) { return device; }
Code cudaDeviceGetPCIBusId(char*, int, int) { return 0; }
Code cudaStreamCreateWithFlags(StreamHandle*, unsigned) { return 0; }
Code cudaStreamDestroy(StreamHandle) { return 0; }
Code cudaStreamWaitEvent(StreamHandle, EventHandle, unsigned) { return 0; }
Code cudaEventCreateWithFlags(EventHandle*, unsigned) { return 0; }
Code cudaEventDestroy(EventHandle) { return 0; }
Code cudaEventRecord(EventHandle, StreamHandle) { return 0; }
Code cudaEventRecordWithFlags(EventHandle, StreamHandle, unsigned) { return 0; }
#ifndef WITHOUT_EVENT_QUERY
Code cudaEventQuery(EventHandle) { return 0; }
#endif
Code cudaMemcpyAsync(void*, const void*, std::size_t, Direction, StreamHandle) { return 0; }
Code cudaMemsetAsync(void*, int, std::size_t, StreamHandle) { return 0; }
Code cudaHostRegister(void*, std::size_t, unsigned) { return 0; }
Code cudaHostUnregister(void*) { return 0; }
Code cudaHostAlloc(void**, std::size_t, unsigned) { return 0; }
Code cudaFreeHost(void*) { return 0; }
Code cudaMalloc(void**, std::size_t) { return 0; }
Code cudaFree(void*) { return 0; }
Code cudaGetLastError() { return 0; }
const char* cudaGetErrorName(Code code) { return code == 2 ? "two" : "other"; }
const char* cudaGetErrorString(Code) { return "a text"; }
}
