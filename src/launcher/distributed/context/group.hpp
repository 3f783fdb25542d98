// Groups of ranks, and the members of a collective.
#pragma once

#include <memory>
#include <vector>

#include "accelmgr/distributed_context.hpp"
#include "launcher/distributed/context/context.hpp"

namespace accelmgr::distributed {

struct Group::State {
  std::vector<int> ranks;
  int rank;                                    ///< This process's rank in the group; -1 if not a member.
  std::shared_ptr<Communicator> communicator;  ///< Null if this process is not a member.
  std::uint64_t context;                       ///< Context::number() of the group's context.
};

/// The members of a collective.
struct Members {
  Context& context;
  std::shared_ptr<Communicator> communicator;  ///< Null: this process is no member, or alone in the world.

  bool communicate() const noexcept { return communicator != nullptr; }
  /// Their GPUs, if they communicate.
  DeviceGroup& device_group() const { return context.device_group(communicator); }
};

/// The members that the group argument of a collective means. Joins the world if necessary. Throws
/// ConfigError for no ranks, duplicate ranks or ranks out of range, UsageError for a group whose context has
/// ended.
Members members_of(const GroupArgument& group);

}  // namespace accelmgr::distributed
