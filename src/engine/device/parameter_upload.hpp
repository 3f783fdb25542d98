// Copies the master's parameters to a device, once per version; frozen ones again only when they were
// written. In a team each rank copies its shards only, and the devices give them to each other.
//
//   copy stream      copies | loaded
//   compute stream   waits for loaded, computes
//
// A GPU copies to its memory in the order in which it was asked to, so a replica asks for the first batch
// before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/cuda/device.hpp"
#include "base/cuda/device_collectives.hpp"
#include "base/unmovable.hpp"
#include "engine/replica/replica.hpp"
#include "engine/session/manifest.hpp"
#include "engine/session/shards.hpp"

namespace accelmgr::device {

/// Merges ranges whose pages touch or overlap, because no page can be registered twice. Pages have
/// `page_bytes` bytes.
std::vector<std::span<std::byte>> merge_pages(std::vector<std::span<std::byte>> ranges,
                                              std::size_t page_bytes);

/// Used by one thread. Device, manifest, sink and the compute stream outlive it, and so do places and
/// targets. Members throw DeviceError.
class ParameterUpload : base::Unmovable {
 public:
  /// `targets` has memory of the device for each parameter that has
  /// its own memory, row-major, and null for one that shares another's. Calls ParameterSource::built() before
  /// it registers the pages of all parameters, which takes long.
  ParameterUpload(Device& device, const replica::Binding& binding, std::span<std::byte* const> targets,
                  StreamHandle compute);
  ~ParameterUpload();

  /// From now on, load() shares the work with the other ranks of `collectives`, which outlive this or the
  /// next call of join() or leave().
  /// Requires: all of them join, and call load() in the same attempts.
  void join(DeviceCollectives& collectives);
  /// From now on, load() copies everything itself, as in the beginning.
  void leave();

  /// Queues copies of the parameters that the runner calls stale. Work that is queued on the compute stream
  /// from now on begins after them. Returns at once, except in a team, where it may wait for the others; if
  /// nobody wants the parameters any more, the communicator is aborted, and the parameters on the device are
  /// undefined until the next load().
  /// Requires: work that is queued already does not need the parameters.
  void load();

 private:
  struct Copy {
    std::byte* to = nullptr;  ///< Null: the parameter has no memory of its own.
    std::byte* from = nullptr;
    std::size_t bytes = 0;
  };

  /// What is needed in a team.
  struct Team {
    DeviceCollectives& collectives;
    session::ShardPlan plan;
    Memory gathered;  ///< One bucket, padded to shards of one size.
  };

  void register_master();
  bool load_shards();
  bool load_shard(std::size_t bucket);

  Device& device_;
  const session::Manifest& manifest_;
  replica::ParameterSource& source_;
  StreamHandle compute_;
  std::vector<Copy> all_;  ///< Of each parameter.
  std::vector<Registration> registrations_;
  Stream copies_;
  Event loaded_;
  std::optional<Team> team_;
};

}  // namespace accelmgr::device
