// Contexts that were let go of while their processes ran, and whose processes are no daemons: the program
// waits for them before it ends.
#pragma once

#include <memory>

#include "accelmgr/launch.hpp"

namespace accelmgr::launch {

/// What can be kept is known to be before anything is: call it before the first processes are started.
void prepare_to_keep();
void keep(std::unique_ptr<SpawnContext::Processes> processes) noexcept;

/// Waits for all of them; failures are logged. At exit it happens by itself.
void end_kept_contexts() noexcept;

}  // namespace accelmgr::launch
