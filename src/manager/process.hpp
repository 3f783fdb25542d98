// The manager process: it owns the session, loads the data, and watches over the runners.
#pragma once

#include "base/unique_fd.hpp"

namespace accelmgr::manager {

/// The whole life of the manager process, from accelmgr::init() on, while it has one thread. `socket`: to the
/// host.
[[noreturn]] void run(base::UniqueFd socket, base::UniqueFd host_pidfd = {});

/// The launcher process that a manager executes in the place of a lost one; never returns.
[[noreturn]] void run_launcher(base::UniqueFd socket);

}  // namespace accelmgr::manager
