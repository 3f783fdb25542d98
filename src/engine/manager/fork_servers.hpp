// The fork servers of a manager: the first, which is forked before the manager starts threads, and those that
// replace a lost one, which are executed.
#pragma once

#include <span>

#include "accelmgr/config.hpp"
#include "base/ipc/fork_server_client.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::manager {

/// Forks the first fork server of this manager. Call it before this process starts threads, and before any
/// code of the user has run. It ends with this process or with that of `host_pidfd`. It does not inherit
/// `close_in_fork_server`. `config` must live as long as this process. Throws UsageError, SystemError.
ipc::ForkServerClient fork_first_server(const Config& config, int host_pidfd,
                                        std::span<const int> close_in_fork_server);

/// Starts a fork server by exec: a fork of this process would copy locks that its other threads hold. Throws
/// SystemError, SessionError.
ipc::ForkServerClient execute_fork_server(const Config& config, int host_pidfd);

/// Runs the fork server process that execute_fork_server() has started. `socket` leads to the manager.
[[noreturn]] void run_fork_server(base::UniqueFd socket);

}  // namespace accelmgr::manager
