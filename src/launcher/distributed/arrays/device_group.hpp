// The GPUs of a communicator's members: collectives of tensors that lie there, over NCCL where it can be
// used.
//
//   new --first call: the members compare their GPUs--> over NCCL --an error, a lost member--> broken
//                                                  \--> through CPU memory
//
// The communicator itself stays in CPU memory. It carries the agreement on each call (a mismatch and missing
// ranks are named as ever), the id of NCCL's communicator, and tells which members live. Nothing of CUDA and
// NCCL is loaded before the first call.
//
// Calls block, though NCCL's do not: the operation is queued on the stream that computes, and the rank waits
// for an event behind it. So an error is that of its call, and what was allocated for it may be freed.
//
// Promises that do not hold over NCCL: see base/cuda/device_collectives.hpp.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "accelmgr/communicator.hpp"
#include "base/cuda/device_collectives.hpp"
#include "base/unmovable.hpp"
#include "launcher/distributed/arrays/array.hpp"

namespace accelmgr::distributed {

/// Where the tensors of a call are: a device of this process, and the stream that writes and reads them.
struct OnDevice {
  int device = 0;
  device::StreamHandle stream = nullptr;
};

/// How a rank gets CUDA and NCCL. Both throw UsageError where there is none.
struct DeviceLibraries {
  std::function<device::Runtime()> runtime;
  std::function<device::Nccl()> nccl;
};

/// The libraries that this process has already, because torch loaded them, or those of the system.
DeviceLibraries device_libraries();
/// Groups that are made from now on use the libraries at these paths instead. For tests.
void use_device_libraries(const std::string& cuda, const std::string& nccl);

/// Used by one thread at a time. The communicator outlives it, or is called no more.
class DeviceGroup : base::Unmovable {
 public:
  struct Options {
    DeviceLibraries libraries = device_libraries();
    std::string cpu_memory_because;  ///< If not empty, NCCL is not to be used: the reason.
    double timeout_s = 300;          ///< Of each wait for the other members.
  };
  DeviceGroup(Communicator& members, Options options);
  ~DeviceGroup();

  // All of these take memory of `place.device`, with the contract of arrays.hpp. The thread's current device
  // is `place.device`. They block until the result is there. Each returns false, on all members, if the same
  // call is to be made in CPU memory; it has done nothing then but compare the calls. The first member says
  // once in the log why. They throw as Communicator does; UsageError for another device than in the first
  // call; DeviceError if this member's device fails.

  [[nodiscard]] bool all_reduce(const Array& in, void* out, ReduceOp op, const OnDevice& place);
  [[nodiscard]] bool all_gather(const Array& in, void* out, const OnDevice& place);
  [[nodiscard]] bool broadcast(const Array& like, void* data, int src, const OnDevice& place);
  [[nodiscard]] bool reduce_scatter(const Array& in, void* out, ReduceOp op, const OnDevice& place);
  [[nodiscard]] bool all_to_all(const Array& in, void* out, const OnDevice& place);

 private:
  class Watch;
  struct Nccl;
  using Queue = std::function<bool(device::DeviceCollectives&)>;

  void check_place(const OnDevice& place) const;
  /// Whether calls go over NCCL. The first call of all members asks them.
  bool over_nccl(const OnDevice& place);
  bool reduces(DType dtype, ReduceOp op);
  void establish(const OnDevice& place);
  std::string what_hinders(const OnDevice& place);
  std::string connect();
  /// Makes a call over NCCL, if there are elements. Returns true, or throws.
  bool run(const char* call, const Array& array, const OnDevice& place, const Queue& queue);

  Communicator& members_;
  Options options_;
  std::unique_ptr<Watch> watch_;
  std::unique_ptr<Nccl> nccl_;
  std::optional<int> device_;
  bool established_ = false, broken_ = false;
  std::set<std::pair<DType, ReduceOp>> told_;  ///< Reductions that NCCL does not have.
};

}  // namespace accelmgr::distributed
