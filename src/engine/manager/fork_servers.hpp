// The fork servers of a manager: the first, which is forked if the manager has one thread, and those that
// replace a lost one, which are executed.
#pragma once

#include <span>

#include "accelmgr/config.hpp"
#include "base/ipc/fork_server_client.hpp"

namespace accelmgr::manager {

/// Forks the first fork server of this manager; executes it if the process has other threads, as that of an
/// interpreter whose sitecustomize starts some. Call it before any code of the user has run. It ends with
/// this process or with that of `host_pidfd`. It does not inherit `close_in_fork_server`. `config` must live
/// as long as this process. Throws SystemError, SessionError.
ipc::ForkServerClient fork_first_server(const Config& config, int host_pidfd,
                                        std::span<const int> close_in_fork_server);

/// Starts a fork server by exec: a fork of this process would copy locks that its other threads hold. Throws
/// SystemError, SessionError.
ipc::ForkServerClient execute_fork_server(const Config& config, int host_pidfd);

}  // namespace accelmgr::manager
