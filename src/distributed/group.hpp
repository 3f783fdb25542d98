// Groups of ranks, and what a collective does with its group argument.
#pragma once

#include <memory>
#include <vector>

#include "accelmgr/distributed.hpp"
#include "distributed/context.hpp"

namespace accelmgr::distributed {

struct Group::State {
  std::vector<int> ranks;
  int rank;                                    ///< Of this process; -1 outside.
  std::shared_ptr<Communicator> communicator;  ///< Null outside.
  std::uint64_t context;                       ///< Its number.
};

/// Who takes part in a collective.
struct Members {
  Context& context;
  std::shared_ptr<Communicator> communicator;  ///< Null: this process is outside, or alone in the world.

  bool communicate() const noexcept { return communicator != nullptr; }
};

/// Joins the world, if need be. Throws ConfigError for ranks out of range, doubled or none, UsageError for a
/// group of a context that has ended.
Members members_of(const GroupArgument& group);

}  // namespace accelmgr::distributed
