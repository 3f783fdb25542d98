// The life of a launched process after its fork.
#pragma once

#include "base/ipc/fork_server.hpp"
#include "launcher/launch/run/spawner.hpp"

namespace accelmgr::launch {

/// The roles of this program that it registers (base/ipc/roles.hpp). A child gets two further arguments: the
/// descriptor of its socket, and its rank. The fork server is executed, or forked by the zygote.
inline constexpr const char* child_argument = "--accelmgr-child";
inline constexpr const char* fork_server_argument = "--accelmgr-forkserver";
inline constexpr const char* fork_server_role = "fork_server";

/// Called in a child that the fork server has just forked: reads the order and carries it out. Does not
/// return.
[[noreturn]] void run_child(ipc::SpawnRequest request, const Calls& calls) noexcept;

/// Called in a launched process when its function has returned or failed and that was reported, with its rank
/// and the code with which it will end: for a language that has functions to call at the end of a process.
using ExitFunction = void (*)(int rank, int code) noexcept;
void set_exit_function(ExitFunction function) noexcept;

/// The options of a fork server whose children call run_child(), for a creator with that pidfd.
inline ipc::ForkServerOptions fork_server_options(int creator = -1) {
  return {.creator = creator, .adopt_orphans = true, .child_name = "accelmgr:rank", .core_dumps = true};
}

}  // namespace accelmgr::launch
