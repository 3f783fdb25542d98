// Sums up the gradients of a team of devices, and copies this rank's shards of the sum to the session.
//
//   compute stream   .. W0 .. W1 | ready[0] .. W2 .. W3 | ready[1] .. computed
//   copy stream                  waits for ready[0], gathers 0 and 1, reduce-scatter, shard | arrived[0], ..
//   runner's thread              finish(): awaits arrived[0], hands over the shard, .. awaits computed, votes
//
// W is a kernel that completes a gradient, "|" the record of an event. All ranks must queue the same
// operations in the same order, though each sees another order of gradients, and other parameters that are
// not used. So the buckets are those of session::ShardPlan, which follow from the manifest, and a bucket is
// queued only behind the one before it. A gradient that a rank does not have counts as zeros there.
//
// An attempt that a rank leaves in the middle leaves the ranks at different operations: the communicator is
// aborted, and the team needs another one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/cuda/device.hpp"
#include "base/cuda/device_collectives.hpp"
#include "base/unmovable.hpp"
#include "engine/replica/replica.hpp"
#include "engine/session/manifest.hpp"
#include "engine/session/shards.hpp"

namespace accelmgr::device {

/// Used by one thread. The constructor's arguments outlive it. Members throw DeviceError, and what the runner
/// throws.
class GradientShards : base::Unmovable {
 public:
  /// Members of a GradientCopies.
  struct Parts {
    Device& device;
    const replica::Binding& binding;
    std::byte*
        memory;  ///< With the places of all gradients (session::ShardPlan); the slab, or staging memory.
    StreamHandle compute, copies;
  };

  GradientShards(const Parts& parts, DeviceCollectives& collectives);
  /// Aborts the communicator if an attempt is under way.
  ~GradientShards();

  /// Aborts the communicator if an attempt that was left has work under way.
  void abandon() noexcept;
  /// Parts::memory is elsewhere from now on.
  void move(std::byte* memory) { parts_.memory = memory; }

  // See GradientCopies.
  void begin_attempt();
  void written(std::size_t index, const std::byte* gradient, const Event* complete);
  bool finish();
  std::vector<std::vector<std::size_t>> buckets() const;

 private:
  static constexpr std::size_t nowhere = ~std::size_t{0};
  struct Parameter {
    std::size_t bucket = nowhere;  ///< Parameters that cannot be trained are in none.
    // These are reset by begin_attempt().
    const std::byte* gradient = nullptr;  ///< Null: not written.
    bool complete = false;                ///< Written in the last micro-batch.
  };
  struct Bucket {
    session::Bytes bytes, shard;
    session::Element element;
    Event ready, arrived;
    // These are reset by begin_attempt().
    bool is_trained = false;
    std::size_t incomplete = 0;
  };

  void make_room(std::uint64_t bytes);
  bool left();
  std::size_t skip_frozen(std::size_t bucket) const;
  void queue_complete(const Event* complete);
  bool queue_next(const Event* complete);

  Parts parts_;
  DeviceCollectives& collectives_;
  const session::ShardPlan plan_;
  Memory gathered_;  ///< One bucket, padded to shards of one size. The copy stream uses it for one bucket
                     ///< after the other.
  Memory sum_;       ///< One shard.
  std::uint64_t room_ = 0;  ///< Bytes of the longest shard for which there is room.
  Event computed_;
  std::vector<Parameter> parameters_;
  std::vector<Bucket> buckets_;
  std::size_t queued_ = 0;  ///< The next bucket of this attempt; all before it are queued or frozen.
  bool under_way_ = false;  ///< From the first bucket of an attempt until all of them have arrived.
};

}  // namespace accelmgr::device
