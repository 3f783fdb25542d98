// Which rank gets which part of a sum that the devices of a team make. A team is some ranks of an attempt
// whose devices reduce-scatter the gradients: each slab then has shards of the sum over the team, and not the
// gradients of its rank. The tags of the slab say so (layout.hpp): only devices know this plan.
//
//   bytes        0 .. decay ..                                    no_decay ..            frozen ..
//                | bucket 1              | bucket 0             | | bucket 2           | | bucket 3 |
//   team of 3    | shard 0 | 1      | 2  | 0     | 1     | 2    | | 0     | 1    | 2   | ..
//
// The plan follows from the manifest alone. So all ranks of a team cut alike, whatever order of gradients
// each of them sees. Each frozen parameter has a bucket of its own, which counts while the parameter is
// unfrozen.
//
// Shards cut tensors, because a bucket is often one tensor: with whole tensors the devices would copy one
// after the other, and one of them all of a large embedding.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "engine/session/manifest.hpp"

namespace accelmgr::session {

/// The first bucket is small, so that copying begins early.
inline constexpr std::uint64_t first_bucket_bytes = std::uint64_t{1} << 20;
inline constexpr std::uint64_t bucket_bytes = std::uint64_t{25} << 20;

/// Cuts a sequence of tensors into buckets. A bucket ends with the tensor that fills it.
class BucketRule {
 public:
  /// Whether the next tensor, of `bytes` bytes, begins a bucket.
  bool begins(std::uint64_t bytes) noexcept {
    const bool begins = room_ == 0;
    if (begins) room_ = std::exchange(next_, bucket_bytes);
    room_ -= std::min(room_, bytes);
    return begins;
  }
  /// The next tensor begins a bucket.
  void end() noexcept { room_ = 0; }

 private:
  std::uint64_t room_ = 0, next_ = first_bucket_bytes;
};

/// The bytes [first, end) of the tensors as devices have them.
struct Bytes {
  std::uint64_t first = 0, end = 0;
  std::uint64_t count() const noexcept { return end - first; }
  bool operator==(const Bytes&) const = default;
};

class ShardPlan {
 public:
  enum class Of {
    gradients,   ///< Buckets for the parameters that can be trained.
    parameters,  ///< Buckets for all parameters.
  };
  ShardPlan(const Manifest& manifest, Of of = Of::gradients);

  /// Where a tensor begins if all tensors lie in the master's order, with the dtypes that runners have.
  std::uint64_t place(std::size_t tensor) const noexcept { return places_[tensor]; }
  /// Where the last tensor ends.
  std::uint64_t bytes() const noexcept { return bytes_; }
  /// Whether slabs hold the gradients at these places, in the dtypes that runners have.
  bool is_of_slabs(const Manifest& manifest) const noexcept;

  /// The buckets in the order in which they travel: as backward usually completes gradients, the last
  /// parameter first; then the parameters without weight decay, which are small. All tensors of a bucket have
  /// one dtype. A bucket ends with the tensor that fills it, and begins and ends at multiples of 64 bytes.
  std::span<const Bytes> buckets() const noexcept { return buckets_; }
  /// The tensors of a bucket, in the order of the manifest.
  std::span<const std::size_t> tensors(std::size_t bucket) const noexcept { return tensors_[bucket]; }

  /// How much of a bucket each rank of a team of `size` holds: a multiple of 64 bytes. The last shards may
  /// reach beyond the bucket, and hold nothing there.
  std::uint64_t shard_bytes(const Bytes& bucket, int size) const noexcept;
  /// The shard of the rank at `position` of the team. May be empty.
  Bytes shard(const Bytes& bucket, int position, int size) const noexcept;

 private:
  void cut(const Manifest& manifest, std::span<const std::size_t> tensors, BucketRule& rule, bool each_alone);

  std::vector<std::uint64_t> places_;
  std::uint64_t bytes_ = 0;
  std::vector<Bytes> buckets_;
  std::vector<std::vector<std::size_t>> tensors_;
};

}  // namespace accelmgr::session
