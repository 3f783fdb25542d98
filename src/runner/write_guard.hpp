// Names the parameter when a model writes into the master parameters, which runners map read-only.
#pragma once

#include "session/manifest.hpp"
#include "session/views.hpp"

namespace accelmgr::runner {

/// Installs handlers for SIGSEGV and SIGBUS. For a fault inside the parameters they write the name of the
/// parameter into the rank record, abort the attempt and end the process with exit_failed. Any other fault
/// has its default action. Call once per process; `runner` and `manifest` must stay valid until it ends.
void guard_parameters(const session::RunnerView& runner, const session::Manifest& manifest);

}  // namespace accelmgr::runner
