// The process of a runner.
#pragma once

#include "accelmgr/config.hpp"
#include "base/ipc/fork_server.hpp"

namespace accelmgr::runner {

/// Exit code of a runner that failed with an exception. Its rank record holds the text.
constexpr int exit_failed = 17;

// What a runner and its manager say over the lifeline. A runner with a GPU opens it, says so, and waits until
// it is told to build its replica; when it is built, the next one may build. Others begin to build at once.
inline constexpr const char* said_opened = "opened";
inline constexpr const char* told_to_build = "build";
inline constexpr const char* said_built = "built";
inline constexpr const char* said_ready = "ready";

/// Runs a runner process, from its fork to its end. Called in a child of the fork server. `request.fds` holds
/// the descriptors of the session, then the lifeline: one end of a socket whose other end the manager holds.
/// Ends the process by _exit() with 0 or exit_failed. Throws SessionError when the session cannot be mapped.
int run(const Config& config, ipc::SpawnRequest request);

}  // namespace accelmgr::runner
