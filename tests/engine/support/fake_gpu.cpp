// The fakes of CUDA and of NCCL as a library with the names of CUDA's runtime and of NCCL:
// programs that load that library run without a GPU. Each process that calls it has a fake of its own.
#include "engine/support/fake_cuda.hpp"
#include "engine/support/fake_nccl.hpp"

using accelmgr::device::Code;
using accelmgr::device::Direction;
using accelmgr::device::EventHandle;
using accelmgr::device::Runtime;
using accelmgr::device::StreamHandle;
using accelmgr::test::FakeCuda;
using accelmgr::test::FakeNccl;

namespace {

std::vector<std::shared_ptr<FakeCuda::Graph>> graphs;  // None is ever destroyed.
FakeCuda* the_fake = nullptr;  // Never destroyed: threads of the process may use it until the end.

FakeCuda& started() {
  if (the_fake == nullptr) the_fake = new FakeCuda(FakeCuda::Execution::threads);
  return *the_fake;
}

const Runtime& fake() {
  started();
  static const auto functions = FakeCuda::runtime();
  return functions;
}

const accelmgr::device::Nccl& nccl() {
  started();
  FakeNccl::of_process();
  static const auto functions = FakeNccl::table();
  return functions;
}

}  // namespace

extern "C" {
/// A program that finds this name knows that its figures say nothing of a GPU.
extern const int accelmgr_fake_cuda = 1;
/// Takes memory of the host for the device's. Call it first. lazy: FakeCuda::Execution::lazy; otherwise
/// streams have threads.
void fake_cuda_start(int lazy, std::uint64_t seed) {
  the_fake = new FakeCuda(lazy != 0 ? FakeCuda::Execution::lazy : FakeCuda::Execution::threads, seed);
  the_fake->take_any_memory();
}
void fake_cuda_fail(const char* function, int nth, Code code) { started().fail(function, nth, code); }
void fake_cuda_break_after(int operations, Code code) { started().break_after(operations, code); }
void fake_cuda_hang_after(int operations) { started().hang_after(operations); }
int fake_cuda_calls(const char* function) { return started().calls(function); }
std::size_t fake_cuda_graph_size(StreamHandle stream) { return started().graph_size(stream); }
void fake_cuda_launch(StreamHandle stream, FakeCuda::Graph* graph, std::size_t first, std::size_t last) {
  started().launch(stream, *graph, first, last);
}
int fake_nccl_sums() { return FakeNccl::of_process().calls("ncclReduceScatter"); }
int fake_cuda_unregistered_copies() { return started().unregistered_copies(); }

Code cudaSetDevice(int device) { return fake().set_device(device); }
Code cudaDeviceGetPCIBusId(char* text, int size, int device) { return fake().pci_bus_id(text, size, device); }
Code cudaStreamCreateWithFlags(StreamHandle* stream, unsigned flags) {
  return fake().stream_create(stream, flags);
}
Code cudaStreamDestroy(StreamHandle stream) { return fake().stream_destroy(stream); }
Code cudaStreamWaitEvent(StreamHandle stream, EventHandle event, unsigned flags) {
  return fake().stream_wait_event(stream, event, flags);
}
Code cudaEventCreateWithFlags(EventHandle* event, unsigned flags) {
  return fake().event_create(event, flags);
}
Code cudaEventDestroy(EventHandle event) { return fake().event_destroy(event); }
Code cudaEventRecord(EventHandle event, StreamHandle stream) { return fake().event_record(event, stream); }
Code cudaEventRecordWithFlags(EventHandle event, StreamHandle stream, unsigned flags) {
  return fake().event_record_with_flags(event, stream, flags);
}
Code cudaEventQuery(EventHandle event) { return fake().event_query(event); }
Code cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, Direction direction,
                     StreamHandle stream) {
  return fake().copy(to, from, bytes, direction, stream);
}
Code cudaMemsetAsync(void* memory, int value, std::size_t bytes, StreamHandle stream) {
  return fake().fill(memory, value, bytes, stream);
}
Code cudaHostRegister(void* memory, std::size_t bytes, unsigned flags) {
  return fake().host_register(memory, bytes, flags);
}
Code cudaHostUnregister(void* memory) { return fake().host_unregister(memory); }
Code cudaHostAlloc(void** memory, std::size_t bytes, unsigned flags) {
  return fake().host_allocate(memory, bytes, flags);
}
Code cudaFreeHost(void* memory) { return fake().host_free(memory); }
Code cudaMalloc(void** memory, std::size_t bytes) { return fake().allocate(memory, bytes); }
Code cudaFree(void* memory) { return fake().free(memory); }
Code cudaGetLastError() { return fake().last_error(); }
const char* cudaGetErrorName(Code code) { return fake().error_name(code); }
const char* cudaGetErrorString(Code code) { return fake().error_text(code); }

// NCCL. The fake of CUDA must execute in threads.
using accelmgr::device::CommunicatorHandle;
using accelmgr::device::NcclCode;
using accelmgr::device::NcclConfig;
using accelmgr::device::NcclId;
using accelmgr::device::NcclOperation;
using accelmgr::device::NcclType;

NcclCode ncclGetVersion(int* version) { return nccl().get_version(version); }
NcclCode ncclGetUniqueId(NcclId* id) { return nccl().get_unique_id(id); }
NcclCode ncclCommInitRankConfig(CommunicatorHandle* handle, int size, NcclId id, int rank,
                                NcclConfig* config) {
  return nccl().init_rank(handle, size, id, rank, config);
}
NcclCode ncclCommGetAsyncError(CommunicatorHandle handle, NcclCode* error) {
  return nccl().async_error(handle, error);
}
NcclCode ncclCommAbort(CommunicatorHandle handle) { return nccl().abort(handle); }
NcclCode ncclCommFinalize(CommunicatorHandle handle) { return nccl().finalize(handle); }
NcclCode ncclCommDestroy(CommunicatorHandle handle) { return nccl().destroy(handle); }
NcclCode ncclAllReduce(const void* from, void* to, std::size_t count, NcclType type, NcclOperation operation,
                       CommunicatorHandle handle, StreamHandle stream) {
  return nccl().all_reduce(from, to, count, type, operation, handle, stream);
}
NcclCode ncclReduceScatter(const void* from, void* to, std::size_t count, NcclType type,
                           NcclOperation operation, CommunicatorHandle handle, StreamHandle stream) {
  return nccl().reduce_scatter(from, to, count, type, operation, handle, stream);
}
NcclCode ncclAllGather(const void* from, void* to, std::size_t count, NcclType type,
                       CommunicatorHandle handle, StreamHandle stream) {
  return nccl().all_gather(from, to, count, type, handle, stream);
}
NcclCode ncclBroadcast(const void* from, void* to, std::size_t count, NcclType type, int root,
                       CommunicatorHandle handle, StreamHandle stream) {
  return nccl().broadcast(from, to, count, type, root, handle, stream);
}
NcclCode ncclSend(const void* from, std::size_t count, NcclType type, int peer, CommunicatorHandle handle,
                  StreamHandle stream) {
  return nccl().send(from, count, type, peer, handle, stream);
}
NcclCode ncclRecv(void* to, std::size_t count, NcclType type, int peer, CommunicatorHandle handle,
                  StreamHandle stream) {
  return nccl().receive(to, count, type, peer, handle, stream);
}
NcclCode ncclGroupStart() { return nccl().group_start(); }
NcclCode ncclGroupEnd() { return nccl().group_end(); }
const char* ncclGetErrorString(NcclCode code) { return nccl().error_text(code); }
const char* ncclGetLastError(CommunicatorHandle handle) { return nccl().last_error(handle); }

// What tests and benchmarks call besides.
Code cudaGetDeviceCount(int* count) {
  *count = 1;
  return 0;
}
Code cudaStreamBeginCapture(StreamHandle stream, int) {
  started().begin_graph(stream);
  return 0;
}
Code cudaStreamEndCapture(StreamHandle stream, FakeCuda::Graph** graph) {
  *graph = graphs.emplace_back(started().end_graph(stream)).get();
  return 0;
}
Code cudaGraphInstantiate(FakeCuda::Graph** executable, FakeCuda::Graph* graph, unsigned long long) {
  *executable = graph;
  return 0;
}
Code cudaGraphLaunch(FakeCuda::Graph* executable, StreamHandle stream) {
  started().launch(stream, *executable);
  return 0;
}
Code cudaRuntimeGetVersion(int* version) {
  *version = 0;
  return 0;
}
Code cudaDriverGetVersion(int* version) {
  *version = 0;
  return 0;
}
}
