// The collectives of a team of devices, over NCCL. Each rank is a process with a device of its own.
//
//   connecting --connect()--> ready --abort(), an error, a deadline, an unwanted wait--> aborted
//
// A communicator is for one team, and it ends as a whole: a rank that dies, hangs or leaves in the middle
// takes the order of operations with it. The others abort theirs, and the next team makes another one.
//
// All ranks make the same calls in the same order, with the same sizes. NCCL does not notice where they do
// not: the values are wrong then, or the call ends at the deadline.
//
// What holds between processes on CPUs (accelmgr/communicator.hpp) and not between devices:
//   - The order of summation. NCCL sums in an order that depends on its algorithm, on the topology and on the
//     size of the team, not in order of rank. The sum of floating-point numbers differs in the last bits from
//     that of CPUs, and from that of another team. All ranks get the same bits of one sum.
//   - bit_and and bit_or, and reductions of booleans, 16-bit integers and complex numbers: NCCL has none.
//   - A mismatch and the ranks that are missing are not named.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <string>

#include "accelmgr/dtype.hpp"
#include "accelmgr/reduce_op.hpp"
#include "base/clock.hpp"
#include "base/cuda/device.hpp"
#include "base/cuda/nccl.hpp"
#include "base/cuda/polling.hpp"
#include "base/unmovable.hpp"
#include "base/waiter.hpp"

namespace accelmgr::device {

/// Used by one thread; only abort() and aborted() may be called by any thread.
/// Requires: device and waiter outlive it.
///
/// Members that return bool queue an operation, or wait. They return false as soon as the waiter does not
/// want the result; the communicator is aborted then. They throw DeviceError if NCCL reports an error, if a
/// wait takes longer than the timeout, and after an abort: in each case the communicator is aborted when they
/// return. Where NCCL says that a peer is gone, the session will say so too: the members wait until the
/// result is not wanted, and throw only if it is still wanted after the timeout. So the death of a rank does
/// not end the others.
///
/// An aborted operation ends on its stream with any values. So a result is good only after wait().
class DeviceCollectives : base::Unmovable {
 public:
  /// One rank makes the id, and all ranks need it.
  /// Requires: the process of that rank lives until all ranks are connected.
  static NcclId make_id(const Nccl& nccl);
  /// Whether NCCL has this reduction of this type.
  static bool reduces(DType dtype, ReduceOp operation) noexcept;

  /// Begins to make the communicator of `size` ranks, and returns at once. The table is copied.
  DeviceCollectives(Device& device, const Nccl& nccl, const NcclId& id, int rank, int size,
                    base::Waiter& waiter, double timeout_s);
  /// Leaves the team if it is ready, which takes at most timing::device_settles_s; otherwise aborts.
  ~DeviceCollectives();

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }

  /// Waits until all ranks have come, at most for `timeout_s`.
  [[nodiscard]] bool connect(double timeout_s);
  [[nodiscard]] bool connect() { return connect(timeout_s_); }

  // Each of these queues an operation on `stream`, which ends when all ranks have queued theirs. `from` and
  // `to` are memory of the device. They may wait for the other ranks to make the same call, but not for the
  // operation.

  /// The reduction of `count` elements over all ranks. In place if `from` is `to`.
  [[nodiscard]] bool all_reduce(const std::byte* from, std::byte* to, std::size_t count, DType dtype,
                                ReduceOp operation, StreamHandle stream);
  /// `from` has `count` elements for each rank; `to` gets the reduction of those for this rank. In place if
  /// `to` is this rank's part of `from`.
  [[nodiscard]] bool reduce_scatter(const std::byte* from, std::byte* to, std::size_t count, DType dtype,
                                    ReduceOp operation, StreamHandle stream);
  /// `to` gets `bytes` from each rank, in order of rank. In place if `from` is this rank's part of `to`.
  [[nodiscard]] bool all_gather(const std::byte* from, std::byte* to, std::size_t bytes, StreamHandle stream);
  /// `memory` of all ranks gets the `bytes` of rank `root`.
  [[nodiscard]] bool broadcast(std::byte* memory, std::size_t bytes, int root, StreamHandle stream);
  /// `from` has `bytes` for each rank; `to` gets `bytes` from each rank, both in order of rank. Not in place.
  [[nodiscard]] bool all_to_all(const std::byte* from, std::byte* to, std::size_t bytes, StreamHandle stream);

  /// Waits until the event has happened, and looks for errors of the communicator meanwhile and afterwards.
  [[nodiscard]] bool wait(const Event& event);

  /// Ends all operations of this rank; they leave any values in their memory. Waits for NCCL at most
  /// timing::team_aborts_s, then tells the waiter, which may end the process, and leaves the communicator as
  /// it is. What any rank queues or waits for from now on fails, here at once and on the others when NCCL or
  /// their deadline tells them.
  void abort() noexcept;
  bool aborted() const noexcept { return aborted_.load(); }
  /// What NCCL reported, or what took too long, when a member aborted. Empty if no member aborted, if the
  /// result was not wanted, or if the device itself is to blame.
  const std::string& failure() const noexcept { return failure_; }

 private:
  using Call = std::function<NcclCode(CommunicatorHandle)>;
  /// Thrown and caught inside: a peer is gone, and the result is not wanted.
  struct Unwanted {};

  NcclCode call(const char* function, const Call& call);
  NcclCode state(const char* function);
  bool queue(const char* function, const Call& call);
  template <class Ready>
  bool poll(const char* function, Ready&& ready, double timeout_s);
  bool ended(const char* function, Waited waited, double timeout_s);
  CommunicatorHandle take(base::Deadline deadline) noexcept;
  void never_ends(const char* what) noexcept;
  void leave() noexcept;
  void check(const char* function, NcclCode code);
  [[noreturn]] void fail(const char* function, NcclCode code);

  Device& device_;
  Nccl nccl_;
  int rank_, size_;
  base::Waiter& waiter_;
  double timeout_s_;
  bool connected_ = false;
  std::string failure_;
  std::atomic<bool> aborted_ = false;
  std::mutex mutex_;
  std::condition_variable idle_;
  // Guarded by the mutex.
  CommunicatorHandle communicator_ = nullptr;  ///< Null: NCCL has taken it back.
  bool busy_ = false;  ///< A function of NCCL is using it. NCCL takes one call at a time.
};

}  // namespace accelmgr::device
