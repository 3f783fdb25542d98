// The life of a launched process after its fork.
#pragma once

#include "ipc/fork_server.hpp"
#include "launch/run/spawner.hpp"

namespace accelmgr::launch {

/// This program executed as a child gets this argument, then the descriptor of its socket, then its rank.
inline constexpr const char* child_argument = "--accelmgr-child";

/// Called in a child that the fork server has just forked: reads the order and carries it out. Does not
/// return.
[[noreturn]] void run_child(ipc::SpawnRequest request, const Calls& calls) noexcept;

/// The options of a fork server whose children call run_child(), for a creator with that pidfd.
inline ipc::ForkServerOptions fork_server_options(int creator = -1) {
  return {.creator = creator, .adopt_orphans = true, .child_name = "accelmgr:rank", .core_dumps = true};
}

/// Runs the fork server whose children call run_child().
[[noreturn]] void become_fork_server(base::UniqueFd socket, const base::UniqueFd& creator) noexcept;

/// Called in this program executed as a child, with the two arguments that follow child_argument.
[[noreturn]] void run_executed_child(int socket, int rank) noexcept;

}  // namespace accelmgr::launch
