// The context of this process: its rank, and the communicator of its world. There is one at a time; all free
// functions of accelmgr/distributed_context.hpp use it.
//
//   serial  --initialize(), or the environment has ranks-->  found  --first collective-->  joined
//     ^                                                        |                             |
//     +----------------- finalize(), or the environment has changed (sync) ------------------+
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "base/unmovable.hpp"
#include "launcher/distributed/context/join.hpp"
#include "launcher/distributed/context/world_environment.hpp"

namespace accelmgr::distributed {

class DeviceGroup;

class Context : base::Unmovable {
 public:
  /// A serial context.
  Context();
  ~Context();
  /// The context that the request describes. It joins the world at the first collective.
  explicit Context(JoinRequest request);

  bool is_serial() const noexcept { return !request_; }
  /// nullopt if serial.
  std::optional<std::string> backend() const;
  std::string model_name() const;
  double timeout_s() const noexcept;
  int rank() const noexcept { return place_.rank; }
  int world_size() const noexcept { return place_.world_size; }
  /// Throws UsageError if local and node ranks are not known yet: they may be unknown until the world is
  /// joined.
  const Place& whole_place() const;
  /// The environment that the context was made from; null if serial.
  const Environment* environment() const noexcept { return request_ ? &request_->environment : nullptr; }
  bool is_joined() const noexcept { return joined_.world != nullptr; }
  /// Unique in this process. Groups remember it: a group ends with its context.
  std::uint64_t number() const noexcept { return number_; }

  /// The communicator of the world. The first call joins: through a store it blocks until all ranks are
  /// there, through the memory of our launcher it does not wait. Throws as initialize() does.
  const std::shared_ptr<Communicator>& world();
  /// The communicator of these ranks (ascending), which include this process. Each list gets one
  /// communicator, made at the first call.
  std::shared_ptr<Communicator> group_of(const std::vector<int>& ranks);
  /// The group that runs collectives on the GPUs of `members`, which is one of these communicators. The first
  /// call for it chooses the backend; without a choice it is the context's.
  DeviceGroup& device_group(const std::shared_ptr<Communicator>& members,
                            const std::optional<std::string>& backend = std::nullopt);
  /// True if all these ranks are on one node. Joins the world.
  bool share_node(const std::vector<int>& ranks);

  /// Marks a context of initialize(): a change of the environment does not replace it.
  void keep() noexcept { kept_ = true; }
  bool is_kept() const noexcept { return kept_; }

 private:
  std::optional<JoinRequest> request_;
  Place place_;
  Joined joined_;
  std::map<std::vector<int>, std::shared_ptr<Communicator>> groups_;
  struct OfDevices;
  std::vector<OfDevices> devices_;
  std::uint64_t number_;
  bool kept_ = false;
};

/// The request that an environment with ranks describes.
JoinRequest request_of(Environment environment);

/// The context of this process. Unless it is kept, and if it has one rank or after sync(temporary), looks in
/// the environment for another one first ("lazy sync").
Context& current();
/// The present context; does not look in the environment.
Context& current_unchanged();
void replace_context(std::unique_ptr<Context> context);
/// The value of set_local_rank(); nullopt if it was not called.
std::optional<int> local_rank_hint();

}  // namespace accelmgr::distributed
