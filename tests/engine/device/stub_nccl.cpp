// Stands in for NCCL's library: it has the functions, and they do little. With VERSION it says that it
// is that one.
#include "base/cuda/nccl.hpp"

using namespace accelmgr::device;

#ifndef VERSION
#define VERSION 22809
#endif

extern "C" {
NcclCode ncclGetVersion(int* version) {
  *version = VERSION;
  return VERSION == 0 ? nccl_code::system_error : nccl_code::success;
}
NcclCode ncclGetUniqueId(NcclId* id) {
  *id = {"an id"};
  return 0;
}
// As NCCL does it: the argument is by value, and the configuration says how long it is.
NcclCode ncclCommInitRankConfig(CommunicatorHandle*, int size, NcclId id, int rank, NcclConfig* config) {
  return id.bytes[3] == 'i' && config->size == 24 && config->blocking == 0 ? size * 10 + rank : -1;
}
NcclCode ncclCommGetAsyncError(CommunicatorHandle, NcclCode* error) {
  *error = nccl_code::in_progress;
  return 0;
}
NcclCode ncclCommAbort(CommunicatorHandle) { return 0; }
NcclCode ncclCommFinalize(CommunicatorHandle) { return 0; }
NcclCode ncclCommDestroy(CommunicatorHandle) { return 0; }
NcclCode ncclAllReduce(const void*, void*, std::size_t, NcclType, NcclOperation, CommunicatorHandle,
                       StreamHandle) {
  return 0;
}
NcclCode ncclReduceScatter(const void*, void*, std::size_t, NcclType, NcclOperation, CommunicatorHandle,
                           StreamHandle) {
  return 0;
}
NcclCode ncclAllGather(const void*, void*, std::size_t, NcclType, CommunicatorHandle, StreamHandle) {
  return 0;
}
NcclCode ncclBroadcast(const void*, void*, std::size_t, NcclType, int, CommunicatorHandle, StreamHandle) {
  return 0;
}
NcclCode ncclSend(const void*, std::size_t, NcclType, int, CommunicatorHandle, StreamHandle) { return 0; }
NcclCode ncclRecv(void*, std::size_t, NcclType, int, CommunicatorHandle, StreamHandle) { return 0; }
NcclCode ncclGroupStart() { return 0; }
NcclCode ncclGroupEnd() { return 0; }
const char* ncclGetErrorString(NcclCode code) {
  return code == nccl_code::system_error ? "a system error" : "other";
}
const char* ncclGetLastError(CommunicatorHandle) { return "the last one"; }
}
