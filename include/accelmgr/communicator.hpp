// A communicator: a group of ranks that compute collectives together. One interface, several backends:
//
//   serial   one rank: every collective is a copy
//   shm      any number of ranks on one host, over shared memory
//   gloo     several hosts: shm within each, gloo between one leader of each
//
// All members make the same calls in the same order, each with a buffer of the same shape and dtype. Before a
// buffer is touched the members compare what they were called with: if anything differs, all of them throw
// CollectiveError{mismatch}, which says who called what, and the communicator stays usable. Every call has a
// deadline; a member that is dead or late ends it on all others with CollectiveError{lost} or {timeout},
// which names the ranks that are missing, and afterwards the communicator is of no use: the rest makes a new
// one with group().
//
// What cannot be meant is UsageError, thrown before anything is done: a root or a peer that is no rank of the
// communicator, sending to or receiving from oneself, a reduction that the dtype does not have. Such a call
// does not count as one.
//
// All calls block. Buffers are plain memory of the host, in row-major order without gaps; `in` and `out` are
// the same address, or do not overlap. One thread at a time in one communicator; different communicators may
// be used at the same time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "accelmgr/errors.hpp"

namespace accelmgr {

enum class DType : std::uint8_t {
  uint8,
  int8,
  uint16,
  int16,
  uint32,
  int32,
  uint64,
  int64,
  float16,
  bfloat16,
  float32,
  float64,
  complex64,
  complex128,
  boolean,
};
std::size_t size_of(DType dtype) noexcept;       ///< Bytes of one element.
std::string_view name_of(DType dtype) noexcept;  ///< As torch writes it: "float32", "bool".

/// Ranks are combined in the order of their numbers; float16 and bfloat16 in float32, rounded once at the
/// end. Sums and products of integers wrap around. avg is sum divided by the number of ranks. bit_and and
/// bit_or are torch's BAND and BOR; of booleans, logical. A sum of booleans is their disjunction, a product
/// their conjunction.
enum class ReduceOp : std::uint8_t { sum, avg, product, min, max, bit_and, bit_or };
std::string_view name_of(ReduceOp op) noexcept;  ///< "SUM", "AVG", ... "AND", "OR".

/// Throws UsageError, which names both, where they make no sense together: avg of integers and booleans, min
/// and max of complex numbers, bit_and and bit_or of anything but integers and booleans.
void check_reduction(DType dtype, ReduceOp op);

/// A collective that could not be completed.
class CollectiveError : public Error {
 public:
  enum class Cause {
    mismatch,  ///< The members did not make the same call.
    timeout,   ///< `ranks` did not arrive before the deadline.
    lost,      ///< `ranks` have died, or cannot be reached any more.
    broken,    ///< An earlier call ended with timeout or lost.
  };
  CollectiveError(const std::string& what, Cause cause, std::vector<int> ranks)
      : Error(what), cause_(cause), ranks_(std::move(ranks)) {}
  Cause cause() const noexcept { return cause_; }
  /// Of the world. The missing or lost ones; of a mismatch: those whose call differs from the lowest rank's.
  const std::vector<int>& ranks() const noexcept { return ranks_; }

 private:
  Cause cause_;
  std::vector<int> ranks_;
};

/// What the members compare besides the kind of the call, its dtype, its reduction and its root.
struct CallOptions {
  std::span<const std::int64_t> shape = {};  ///< Of `in`; null: one dimension of `count` elements.
  double timeout_s = 0;                      ///< 0: the communicator's.
};

class Communicator {
 public:
  virtual ~Communicator() = default;  ///< A member may leave when its last call has returned.

  virtual std::string_view backend() const noexcept = 0;
  virtual int rank() const noexcept = 0;  ///< Of this process among the members, 0 to size() - 1.
  virtual int size() const noexcept = 0;
  /// The rank in the world of each member. A world has 0, 1, 2, ...
  virtual const std::vector<int>& ranks() const noexcept = 0;

  // `count`, here and below, is a number of elements; it may be 0, and beyond 2^32.

  /// out[i] = the reduction of all members' in[i]. The same bits on all members.
  virtual void all_reduce(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                          const CallOptions& options = {}) = 0;
  /// `in` has size() blocks of `count`; out = the reduction of all members' block number rank().
  virtual void reduce_scatter(const void* in, void* out, std::size_t count, DType dtype, ReduceOp op,
                              const CallOptions& options = {}) = 0;
  /// `out` has size() blocks of `count`; block i = the `in` of member i.
  virtual void all_gather(const void* in, void* out, std::size_t count, DType dtype,
                          const CallOptions& options = {}) = 0;
  /// data = that of member `root`.
  virtual void broadcast(void* data, std::size_t count, DType dtype, int root,
                         const CallOptions& options = {}) = 0;
  /// `in` and `out` have size() blocks of `count`; block i of out = block rank() of the `in` of member i.
  virtual void all_to_all(const void* in, void* out, std::size_t count, DType dtype,
                          const CallOptions& options = {}) = 0;
  /// Returns when all members have called it.
  virtual void barrier(const CallOptions& options = {}) = 0;

  // Objects are bytes, of any length, which may differ from member to member.

  virtual std::vector<std::string> all_gather_objects(std::string_view object,
                                                      const CallOptions& options = {}) = 0;
  /// Returns that of member `root`; the others' is not looked at.
  virtual std::string broadcast_object(std::string_view object, int root,
                                       const CallOptions& options = {}) = 0;
  /// From one member to another, in order. The sender may return before the receiver has called; it blocks
  /// when more than a few kilobytes are on their way. Not to oneself.
  virtual void send(std::string_view object, int to, const CallOptions& options = {}) = 0;
  virtual std::string receive(int from, const CallOptions& options = {}) = 0;

  /// A communicator of some members, by their ranks here, in ascending order without doubles; called by
  /// these members only, each time with the same list. Works also after a member outside the list has died,
  /// or after this communicator has broken. Waits until all of them have called it.
  virtual std::shared_ptr<Communicator> group(std::span<const int> ranks,
                                              const CallOptions& options = {}) = 0;
};

}  // namespace accelmgr
