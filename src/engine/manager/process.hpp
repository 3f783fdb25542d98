// The manager process: it owns the session, loads the data, and supervises the runners.
#pragma once

#include "base/unique_fd.hpp"

namespace accelmgr::manager {

/// Runs the manager process, from accelmgr::init() to its end. Call while the process has one thread.
/// `socket` leads to the host. If `host_pidfd` is empty, the pidfd is obtained from the socket.
[[noreturn]] void run(base::UniqueFd socket, base::UniqueFd host_pidfd = {});

/// Runs the fork server process that a manager executes to replace a lost one. `socket` leads to the manager.
[[noreturn]] void run_fork_server(base::UniqueFd socket);

}  // namespace accelmgr::manager
