// Compares what nccl.hpp says with NCCL's header. CMake compiles this file where it is installed; it has no
// code.
#include <nccl.h>

#include <type_traits>

#include "base/cuda/nccl.hpp"
#include "base/cuda/plain_function.hpp"

namespace accelmgr::device {
namespace {

// The calling convention does not tell an enumeration of int's size from int.
static_assert(sizeof(ncclResult_t) == sizeof(NcclCode));
static_assert(sizeof(ncclDataType_t) == sizeof(NcclType));
static_assert(sizeof(ncclRedOp_t) == sizeof(NcclOperation));
static_assert(std::is_same_v<ncclComm_t, CommunicatorHandle>);
static_assert(sizeof(ncclUniqueId) == sizeof(NcclId));
static_assert(alignof(ncclUniqueId) == alignof(NcclId));

static_assert(ncclSuccess == nccl_code::success &&
              ncclUnhandledCudaError == nccl_code::unhandled_cuda_error &&
              ncclSystemError == nccl_code::system_error && ncclInternalError == nccl_code::internal_error &&
              ncclInvalidArgument == nccl_code::invalid_argument &&
              ncclInvalidUsage == nccl_code::invalid_usage && ncclRemoteError == nccl_code::remote_error &&
              ncclInProgress == nccl_code::in_progress);
static_assert(ncclInt8 == int(NcclType::int8) && ncclUint8 == int(NcclType::uint8) &&
              ncclInt32 == int(NcclType::int32) && ncclUint32 == int(NcclType::uint32) &&
              ncclInt64 == int(NcclType::int64) && ncclUint64 == int(NcclType::uint64) &&
              ncclFloat16 == int(NcclType::float16) && ncclFloat32 == int(NcclType::float32) &&
              ncclFloat64 == int(NcclType::float64) && ncclBfloat16 == int(NcclType::bfloat16));
static_assert(ncclSum == int(NcclOperation::sum) && ncclProd == int(NcclOperation::product) &&
              ncclMax == int(NcclOperation::maximum) && ncclMin == int(NcclOperation::minimum) &&
              ncclAvg == int(NcclOperation::mean));

// NcclConfig is the beginning of ncclConfig_t. What its size covers beyond `blocking` is padding, which the
// library replaces by its defaults, because the version says that there is no such field.
constexpr ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
static_assert(std::is_standard_layout_v<NcclConfig> && sizeof(NcclConfig) <= sizeof(ncclConfig_t));
static_assert(offsetof(NcclConfig, size) == offsetof(ncclConfig_t, size) &&
              offsetof(NcclConfig, magic) == offsetof(ncclConfig_t, magic) &&
              offsetof(NcclConfig, version) == offsetof(ncclConfig_t, version) &&
              offsetof(NcclConfig, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(std::is_same_v<decltype(NcclConfig::size), decltype(ncclConfig_t::size)>);
static_assert(std::is_same_v<decltype(NcclConfig::magic), decltype(ncclConfig_t::magic)>);
static_assert(std::is_same_v<decltype(NcclConfig::version), decltype(ncclConfig_t::version)>);
static_assert(std::is_same_v<decltype(NcclConfig::blocking), decltype(ncclConfig_t::blocking)>);
static_assert(NcclConfig{}.magic == theirs.magic && NcclConfig{}.blocking == theirs.blocking);
static_assert(NcclConfig{}.version == NCCL_VERSION(2, 14, 0) && NcclConfig{}.version <= theirs.version);
static_assert(sizeof(NcclConfig) <= offsetof(ncclConfig_t, minCTAs), "only cgaClusterSize is in the padding");

struct PlainNccl {
  static NcclCode of(ncclResult_t);
  static NcclCode* of(ncclResult_t*);
  static NcclType of(ncclDataType_t);
  static NcclOperation of(ncclRedOp_t);
  static NcclId of(ncclUniqueId);
  static NcclId* of(ncclUniqueId*);
  static NcclConfig* of(ncclConfig_t*);
  template <class T>
  static T of(T);
};
#define COMPARE(result, member, function, parameters) \
  static_assert(is_plain<PlainNccl, decltype(&Nccl::member), decltype(function)>);
ACCELMGR_NCCL(COMPARE)
#undef COMPARE

}  // namespace
}  // namespace accelmgr::device
