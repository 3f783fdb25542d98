// The functions of NCCL that the collectives of devices call, as a table. load_nccl() fills it from the
// library; a test fills it with a fake. Nothing here needs NCCL's header: nccl_header.cpp compares types and
// numbers with it wherever it is installed. Nothing links NCCL: a process that does not call load_nccl()
// never has it.
#pragma once

#include <climits>
#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "base/cuda/runtime.hpp"

struct ncclComm;  // NCCL's own name of what a communicator points to.

namespace accelmgr::device {

using CommunicatorHandle = ncclComm*;  ///< ncclComm_t
using NcclCode = int;                  ///< ncclResult_t

namespace nccl_code {
inline constexpr NcclCode success = 0;
inline constexpr NcclCode unhandled_cuda_error = 1;
inline constexpr NcclCode system_error = 2;
inline constexpr NcclCode internal_error = 3;
inline constexpr NcclCode invalid_argument = 4;
inline constexpr NcclCode invalid_usage = 5;
inline constexpr NcclCode remote_error = 6;
inline constexpr NcclCode in_progress = 7;
}  // namespace nccl_code

/// ncclDataType_t
enum class NcclType : int {
  int8 = 0,
  uint8 = 1,
  int32 = 2,
  uint32 = 3,
  int64 = 4,
  uint64 = 5,
  float16 = 6,
  float32 = 7,
  float64 = 8,
  bfloat16 = 9
};

/// ncclRedOp_t
enum class NcclOperation : int { sum = 0, product = 1, maximum = 2, minimum = 3, mean = 4 };

/// ncclUniqueId: names a communicator that is to be. One rank makes it; all its ranks need it.
struct NcclId {
  char bytes[128];
  bool operator==(const NcclId&) const = default;
};

/// The beginning of ncclConfig_t, as NCCL 2.14 had it, the first version with a configuration. Each library
/// since then reads a structure by the size and the version that it states, and takes its defaults for the
/// fields that this version did not have. So one structure fits all of them.
struct NcclConfig {
  std::size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = INT_MIN;  ///< 0: calls return before they are done. INT_MIN: NCCL's default.
};

/// A table as in runtime.hpp. With a communicator that does not block, a call may return in_progress: until
/// async_error() says otherwise, nothing else may be called with that communicator except async_error() and
/// abort(), and the operation need not be on its stream yet.
#define ACCELMGR_NCCL(X)                                                                                   \
  X(NcclCode, get_version, ncclGetVersion, (int* version))                                                 \
  X(NcclCode, get_unique_id, ncclGetUniqueId, (NcclId*))                                                   \
  X(NcclCode, init_rank, ncclCommInitRankConfig,                                                           \
    (CommunicatorHandle*, int size, NcclId, int rank, NcclConfig*))                                        \
  X(NcclCode, async_error, ncclCommGetAsyncError, (CommunicatorHandle, NcclCode*))                         \
  X(NcclCode, abort, ncclCommAbort, (CommunicatorHandle))                                                  \
  X(NcclCode, finalize, ncclCommFinalize, (CommunicatorHandle))                                            \
  X(NcclCode, destroy, ncclCommDestroy, (CommunicatorHandle))                                              \
  X(NcclCode, all_reduce, ncclAllReduce,                                                                   \
    (const void* from, void* to, std::size_t count, NcclType, NcclOperation, CommunicatorHandle,           \
     StreamHandle))                                                                                        \
  X(NcclCode, reduce_scatter, ncclReduceScatter,                                                           \
    (const void* from, void* to, std::size_t count_per_rank, NcclType, NcclOperation, CommunicatorHandle,  \
     StreamHandle))                                                                                        \
  X(NcclCode, all_gather, ncclAllGather,                                                                   \
    (const void* from, void* to, std::size_t count_per_rank, NcclType, CommunicatorHandle, StreamHandle))  \
  X(NcclCode, broadcast, ncclBroadcast,                                                                    \
    (const void* from, void* to, std::size_t count, NcclType, int root, CommunicatorHandle, StreamHandle)) \
  X(NcclCode, send, ncclSend,                                                                              \
    (const void* from, std::size_t count, NcclType, int peer, CommunicatorHandle, StreamHandle))           \
  X(NcclCode, receive, ncclRecv,                                                                           \
    (void* to, std::size_t count, NcclType, int peer, CommunicatorHandle, StreamHandle))                   \
  X(NcclCode, group_start, ncclGroupStart, ())                                                             \
  X(NcclCode, group_end, ncclGroupEnd, ())                                                                 \
  X(const char*, error_text, ncclGetErrorString, (NcclCode))                                               \
  X(const char*, last_error, ncclGetLastError, (CommunicatorHandle))

struct Nccl {
  ACCELMGR_NCCL(ACCELMGR_DECLARE_MEMBER)
};

/// The names and paths under which load_nccl() looks for the library, in this order: torch's wheel, below
/// each of `site_packages`, and the folders of the dynamic linker.
std::vector<std::string> nccl_candidates(const std::vector<std::filesystem::path>& site_packages);

/// Loads the library that this process has already, for instance because torch loaded it, or else the first
/// candidate that is there. It stays loaded. Throws UsageError, with the reason for each candidate, if there
/// is none, if a function is missing, or if its version is older than 2.14.
Nccl load_nccl(const std::vector<std::string>& candidates);

/// Loads the library at `path`, whatever this process has already. Throws likewise.
Nccl load_nccl_at(const std::string& path);

}  // namespace accelmgr::device
