// Copies the gradients of a device to the session, while backward still computes.
//
//   compute stream   .. W0 .. W1 | ready[0] .. W2 .. W3 | ready[1] .. computed
//   copy stream                  waits for ready[0], copies 0 and 1 | arrived[0], waits for ready[1] ..
//   runner's thread              finish(): awaits arrived[0], hands over 0 and 1, .. awaits computed, votes
//
// W is a kernel that completes a gradient, "|" the record of an event. The next attempt waits for the work of
// an attempt that was left.
//
// Gradients travel in buckets, in the order in which they became ready in the first attempt. The values go
// straight to the slab; for a bfloat16 slab the replica rounds them on the device (rounds()). If the slab
// cannot be registered, or once a parameter is unfrozen, they go unrounded to staging memory, and the runner
// captures them from there. Either way they are rounded once, after the sum over the micro-batches; a replica
// in CPU memory rounds after each one.
//
// In a team, the devices sum up their gradients first, and each copies its shards only (gradient_shards.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/cuda/device.hpp"
#include "base/unmovable.hpp"
#include "engine/device/gradient_shards.hpp"
#include "engine/device/pinned_pages.hpp"
#include "engine/replica/replica.hpp"
#include "engine/session/manifest.hpp"
#include "engine/session/shards.hpp"

namespace accelmgr::device {

/// Used by one thread. Device, binding and the compute stream outlive it. Members throw DeviceError,
/// and what the runner throws.
class GradientCopies : base::Unmovable {
 public:
  /// Registers the slab. If the driver refuses that (a sandbox, or a limit of locked memory),
  /// gradients are staged, and the log says so. Kernels run on `compute`. A wait for the device that takes
  /// longer than `timeout_s` means that it hangs.
  GradientCopies(Device& device, const replica::Binding& binding, StreamHandle compute, double timeout_s);
  ~GradientCopies();

  /// From the next attempt on, the ranks of `collectives` sum up their gradients. `collectives` outlives this
  /// or the next call of join() or leave().
  /// Requires: all of them join; no attempt is under way.
  void join(DeviceCollectives& collectives);
  /// From the next attempt on, this rank is alone again, as it is in the beginning.
  void leave();

  /// Forgets the gradients of the attempt before. If that attempt was left, waits for its queued work, which
  /// has the same time limit as any other. Returns false if the runner stops wanting the new attempt
  /// meanwhile; then the old gradients must stay until the next call.
  [[nodiscard]] bool begin_attempt();
  /// Whether written() takes the gradient of parameter `index` rounded to bfloat16 in this attempt: to
  /// nearest even, and a complex number as two. Otherwise it takes the dtype that the parameter has in
  /// runners.
  bool rounds(std::size_t index) const;
  /// Work of the attempt is queued on the compute stream from now on.
  void begin_work() noexcept;

  /// The work queued on the compute stream so far completes the gradient of parameter `index` in this
  /// micro-batch: dense, row-major, the sum over the micro-batches of the attempt. `gradient` is memory of
  /// the device, and stays unchanged until finish() returns unless a later micro-batch adds to it. If more
  /// work is queued already, `complete` is an event that follows the gradient, for instance one that a
  /// launched graph records. Throws ModelError if there is no such parameter, or if its bucket is on the way
  /// already.
  void written(std::size_t index, const std::byte* gradient, const Event* complete = nullptr);

  /// Queues the remaining copies, waits until everything on the compute stream is done and all gradients are
  /// in the session, and tells the runner of each. Returns false if it no longer wants the attempt.
  bool finish();

  /// Waits until the compute stream and the copies are done, or gives the device up. Call it before what they
  /// use is freed.
  void settle() noexcept;

  /// The parameters of each bucket, in the order of their copies.
  std::vector<std::vector<std::size_t>> buckets() const;

 private:
  struct Parameter {
    std::byte* place = nullptr;  ///< Where the copy goes: in the slab, or in the staging memory.
    std::size_t bucket = 0;
    // These are reset by begin_attempt().
    const std::byte* gradient = nullptr;  ///< Null: not written.
    bool complete = false;                ///< Written in the last micro-batch.
  };
  struct Bucket {
    std::vector<std::size_t> parameters;
    Event ready, arrived;
    // These are reset by begin_attempt().
    std::size_t incomplete = 0;
    bool queued = false;
  };

  std::byte* team_memory() const;
  bool await_left_work();
  void make_room();
  void register_slab();
  void place_gradients();
  void cut(std::span<const std::size_t> order);
  void queue(std::size_t bucket, const Event* complete);
  bool finish_alone();
  void hand_over(const Bucket& bucket);
  void keep_order();

  Device& device_;
  replica::Binding binding_;
  const std::vector<session::TensorEntry>& entries_;
  StreamHandle compute_;
  double timeout_s_;
  bool staged_;  ///< All gradients go to staging memory. For a team, they may do so anyway.
  session::ShardPlan plan_;
  bool slab_serves_teams_;
  std::vector<std::uint64_t> bytes_;  ///< The size of each parameter's gradient, before it is rounded.
  // Members are destroyed in reverse order: streams and events first, then the registrations.
  PinnedPages staging_;
  Registration registration_;
  Stream copies_;
  Event computed_;
  std::int64_t begun_ = 0;  ///< When the work under way began, in ns; 0: none is.
  std::vector<Parameter> parameters_;
  std::vector<Bucket> buckets_;
  std::vector<std::size_t> on_the_way_;   ///< Buckets whose copies are queued, in that order.
  std::vector<std::size_t> order_;        ///< Parameters in the order in which they were written.
  std::vector<std::size_t> arrived_;      ///< Parameters of the bucket that is handed over.
  bool ordered_ = false;                  ///< The buckets have the order of the first attempt.
  std::unique_ptr<GradientShards> team_;  ///< Null: alone.
};

}  // namespace accelmgr::device
