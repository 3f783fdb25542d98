// Who holds what of a sum that the devices of a team have made themselves. A team is some ranks of an attempt
// whose devices reduce-scatter the gradients: each slab then holds shards of the sum over the team, and not
// the gradients of its rank.
//
//   elements     0 .. decay ..                                    no_decay ..            frozen ..
//                | bucket 1              | bucket 0             | | bucket 2           |
//   team of 3    | shard 0 | 1      | 2  | 0     | 1     | 2    | | 0     | 1    | 2   |  nobody's
//
// The plan follows from the manifest alone. So all ranks of a team cut alike, whatever order of gradients
// each of them sees, and the reduction knows the holder of each element without a word from them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "session/manifest.hpp"

namespace accelmgr::session {

/// The first bucket is small, so that copying begins early.
inline constexpr std::uint64_t first_bucket_bytes = std::uint64_t{1} << 20;
inline constexpr std::uint64_t bucket_bytes = std::uint64_t{25} << 20;

/// The elements [first, end) of the flat master.
struct Elements {
  std::uint64_t first = 0, end = 0;
  std::uint64_t count() const noexcept { return end - first; }
  bool operator==(const Elements&) const = default;
};

class ShardPlan {
 public:
  enum class Of {
    gradients,   ///< Without the frozen parameters, which have none.
    parameters,  ///< All of them.
  };
  ShardPlan(const Manifest& manifest, Element element, Of of = Of::gradients);

  /// In the order in which they travel: that in which backward usually completes gradients, the last one
  /// first; then the parameters without weight decay, which are small. A bucket ends with the tensor that
  /// fills it, and begins and ends at multiples of 64 bytes.
  std::span<const Elements> buckets() const noexcept { return buckets_; }
  /// The tensors of a bucket, in the order of the manifest.
  std::span<const std::size_t> tensors(std::size_t bucket) const noexcept { return tensors_[bucket]; }

  /// What each rank of a team of `size` has of a bucket: a multiple of 64 bytes. The last shards may reach
  /// beyond the bucket, and hold nothing there.
  std::uint64_t shard_elements(const Elements& bucket, int size) const noexcept;
  /// The shard of the rank at `position` of the team. May be empty.
  Elements shard(const Elements& bucket, int position, int size) const noexcept;

  struct Holder {
    int position = -1;      ///< In the team; -1: nobody.
    std::uint64_t end = 0;  ///< Elements up to here have the same holder; at the most.
  };
  Holder holder_of(std::uint64_t element, int size) const noexcept;

 private:
  std::uint64_t alignment_;
  std::vector<Elements> buckets_, sorted_;
  std::vector<std::vector<std::size_t>> tensors_;
};

}  // namespace accelmgr::session
