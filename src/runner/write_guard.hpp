// A runner that writes into the master's parameters, which it maps read-only, is told which one it was.
#pragma once

#include "session/manifest.hpp"
#include "session/session.hpp"

namespace accelmgr::runner {

/// Installs handlers for SIGSEGV and SIGBUS that name the parameter at the fault's address in the rank's
/// record, abort the attempt and end the process with exit_failed; any other fault keeps its default meaning.
/// Once per process; all three must outlive it.
void guard_parameters(const session::Session& session, const session::Manifest& manifest, int rank);

}  // namespace accelmgr::runner
