// The description of a call that the members of a communicator compare before a collective touches a buffer.
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

/// Plain data, compared byte by byte. It also goes through shared memory and between nodes.
struct Signature {
  std::uint64_t sequence;  ///< Number of the call in its communicator, from 1.
  std::uint64_t count;     ///< Elements; 0 for barriers and objects.
  CallKind kind;
  DType dtype;
  ReduceOp op;
  std::uint8_t dimensions : 7;  ///< At most most_dimensions. A tensor with more has its remaining elements in
                                ///< the last dimension.
  std::uint8_t on_devices : 1;  ///< CallOptions::on_devices.
  std::int32_t root;
  std::array<std::int64_t, most_dimensions> shape;

  bool operator==(const Signature&) const = default;
};
static_assert(std::is_trivially_copyable_v<Signature>);

/// A shape whose data() is null stands for [count]. An empty shape whose data() is not null is that of a 0-d
/// tensor.
Signature make_signature(CallKind kind, std::size_t count, DType dtype, ReduceOp op, int root,
                         std::uint64_t sequence, const CallOptions& options);

/// "all_reduce SUM float32 [4, 5]", "broadcast from rank 2 int64 []", "barrier".
std::string describe(const Signature& signature);
/// "call 12 (all_reduce SUM float32 [4, 5])"
std::string numbered(const Signature& signature);

/// Throws CollectiveError{mismatch} unless all signatures are equal: "call 12 differs: rank 0 called
/// all_reduce SUM float32 [4, 5], rank 3 called ...". `ranks` has the rank in the world for each signature.
void check_same(std::span<const Signature> signatures, const std::vector<int>& ranks);

}  // namespace accelmgr::collective
