// A communicator: a group of ranks that compute collectives together. One interface, several backends:
//
//   serial   one rank: every collective is a copy
//   shm      any number of ranks on one node, over shared memory
//   gloo     several nodes: shm within each, TCP between one leader of each
//
// All members make the same calls in the same order, each with a buffer of the same shape and dtype. Before
// they touch a buffer, the members compare their calls. If the calls differ, all members throw
// CollectiveError{mismatch}, which says which rank called what; the communicator stays usable. Every call has
// a deadline. If a member is dead or late, the call throws CollectiveError{lost} or {timeout} on all others
// and names the missing ranks. The communicator is broken then; the remaining members make a new one with
// group().
//
// Invalid arguments throw UsageError before anything is done: a root or a peer that is no rank of the
// communicator, a rank that sends to itself or receives from itself, a reduction that the dtype does not
// support. Such a call does not count as a call of this member.
//
// All calls block. Buffers are plain CPU memory, in row-major order without gaps. `in` and `out` are the same
// address, or do not overlap. One thread at a time may use a communicator; different communicators may be
// used at the same time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "accelmgr/dtype.hpp"
#include "accelmgr/errors.hpp"
#include "accelmgr/reduce_op.hpp"

namespace accelmgr {

/// A collective that could not be completed.
class CollectiveError : public Error {
 public:
  enum class Cause {
    mismatch,  ///< The members did not make the same call.
    timeout,   ///< `ranks` did not arrive before the deadline.
    lost,      ///< `ranks` have died, or can no longer be reached.
    broken,    ///< An earlier call ended with timeout or lost.
  };
  CollectiveError(const std::string& what, Cause cause, std::vector<int> ranks)
      : Error(what), cause_(cause), ranks_(std::move(ranks)) {}
  Cause cause() const noexcept { return cause_; }
  /// Ranks in the world that are missing or lost; for a mismatch, the ranks whose call differs from the call
  /// of the lowest rank.
  const std::vector<int>& ranks() const noexcept { return ranks_; }

 private:
  Cause cause_;
  std::vector<int> ranks_;
};

struct CallOptions {
  /// Shape of `in`; members compare it like the kind of the call, dtype, reduction and root. Null: one
  /// dimension of `count` elements.
  std::span<const std::int64_t> shape = {};
  double timeout_s = 0;  ///< 0: the communicator's default.
  /// The tensors are in memory of devices, and this call passes none of their elements. Members compare this
  /// flag, too.
  bool on_devices = false;
};

class Communicator {
 public:
  virtual ~Communicator() = default;  ///< A member may destroy it once its own last call has returned.

  virtual std::string_view backend() const noexcept = 0;
  virtual int rank() const noexcept = 0;  ///< Rank of this process among the members, 0 to size() - 1.
  virtual int size() const noexcept = 0;
  /// The rank of each member in the world. For the communicator of the world: 0, 1, 2, ...
  virtual const std::vector<int>& ranks() const noexcept = 0;
  /// The ranks in the world of other members that are known to have ended or left. Not a collective: returns
  /// at once, and does not break the communicator. Members on other nodes are not looked at. For code that
  /// waits for something else than this communicator.
  virtual std::vector<int> gone() = 0;

  // In all calls below, `count` is a number of elements; it may be 0, and may exceed 2^32.

  /// out[i] = the reduction of in[i] over all members. All members get the same bits.
  virtual void all_reduce(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                          const CallOptions& options = {}) = 0;
  /// `in` has size() blocks of `count`; out = the reduction over all members of block number rank().
  virtual void reduce_scatter(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                              const CallOptions& options = {}) = 0;
  /// `out` has size() blocks of `count`; block i = the `in` of member i.
  virtual void all_gather(const void* in, void* out, std::size_t count, DType dtype,
                          const CallOptions& options = {}) = 0;
  /// Replaces `data` by the data of member `root`.
  virtual void broadcast(void* data, std::size_t count, DType dtype, int root,
                         const CallOptions& options = {}) = 0;
  /// `in` and `out` have size() blocks of `count`; block i of out = block rank() of the `in` of member i.
  virtual void all_to_all(const void* in, void* out, std::size_t count, DType dtype,
                          const CallOptions& options = {}) = 0;
  /// Returns after all members have called it.
  virtual void barrier(const CallOptions& options = {}) = 0;

  // Objects are byte strings of any length; the length may differ from member to member.

  /// The objects of all members, in the order of ranks.
  virtual std::vector<std::string> all_gather_objects(std::string_view object,
                                                      const CallOptions& options = {}) = 0;
  /// Returns the object of member `root`. The objects of other members are ignored.
  virtual std::string broadcast_object(std::string_view object, int root,
                                       const CallOptions& options = {}) = 0;

  /// Makes a communicator of some members. `ranks` are their ranks in this communicator, in ascending order,
  /// without duplicates. Exactly these members call it, all with the same list; it blocks until all have.
  /// Works also after a member outside the list has died, or after this communicator has broken.
  virtual std::shared_ptr<Communicator> group(std::span<const int> ranks,
                                              const CallOptions& options = {}) = 0;
};

}  // namespace accelmgr
