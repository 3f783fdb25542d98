// A device runner: builds its replica on the master's memory, then computes on every trigger.
#pragma once

#include "accelmgr/config.hpp"
#include "ipc/launcher.hpp"

namespace accelmgr::runner {

/// Exit code of a runner that failed with an exception, which its record tells.
constexpr int exit_failed = 17;

/// The whole life of a runner process, called in a child of the launcher. `request.fds`: the session's
/// descriptors, then one end of a socket whose other end the manager holds: its end is the manager's. Returns
/// the exit code.
int run(const Config& config, ipc::SpawnRequest request);

}  // namespace accelmgr::runner
