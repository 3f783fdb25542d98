// Contexts that were destroyed while their processes ran, and whose processes are not daemons. The program
// waits for these processes before it ends.
#pragma once

#include <memory>

#include "accelmgr/launch.hpp"

namespace accelmgr::launch {

/// Registers the wait at exit. Call it before the first processes are started.
void prepare_detached_contexts();
void detach(std::unique_ptr<SpawnContext::Processes> processes) noexcept;

/// Blocks until the processes of all detached contexts have ended; logs their failures. Runs at exit by
/// itself.
void join_detached_contexts() noexcept;

}  // namespace accelmgr::launch
