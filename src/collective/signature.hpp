// What the members of a communicator compare before a collective touches a buffer.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "accelmgr/communicator.hpp"

namespace accelmgr::collective {

enum class CallKind : std::uint8_t {
  none,
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  all_to_all,
  barrier,
  all_gather_objects,
  broadcast_object,
  group,
};

inline constexpr std::size_t most_dimensions = 16;

/// Plain data, compared byte by byte: it also goes through shared memory and between hosts.
struct Signature {
  std::uint64_t sequence;  ///< Number of the call in its communicator, from 1.
  std::uint64_t count;     ///< Elements; 0 of barriers and objects.
  CallKind kind;
  DType dtype;
  ReduceOp op;
  std::uint8_t dimensions;  ///< At most most_dimensions; of a tensor with more, the rest is in the last one.
  std::int32_t root;
  std::array<std::int64_t, most_dimensions> shape;

  bool operator==(const Signature&) const = default;
};
static_assert(std::is_trivially_copyable_v<Signature>);

/// Without a shape (its data() is null): [count]. One of no dimensions is that of a 0-d tensor.
Signature make_signature(CallKind kind, std::size_t count, DType dtype, ReduceOp op, int root,
                         std::uint64_t sequence, const CallOptions& options);

/// "all_reduce SUM float32 [4, 5]", "broadcast from rank 2 int64 []", "barrier".
std::string describe(const Signature& signature);

/// Throws CollectiveError{mismatch} unless all are the same: "call 12 differs: rank 0 called all_reduce SUM
/// float32 [4, 5], rank 3 called ...". `ranks`: of the world, of each signature.
void check_same(std::span<const Signature> signatures, const std::vector<int>& ranks);

/// CollectiveError{timeout or lost or broken} in the same words everywhere: "call 12 (all_reduce SUM float32
/// [4]): rank 3 did not arrive within 5 s", "... rank 3 has died".
CollectiveError missing_ranks(CollectiveError::Cause cause, const Signature& signature,
                              std::vector<int> ranks, double timeout_s);

}  // namespace accelmgr::collective
