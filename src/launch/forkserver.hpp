// The forkserver: this program executed anew, which does nothing but fork launchers. Its image is as main()
// found it: no thread, no device context, and as small as it ever was.
//
//   process --- launch ---> launcher ---> ranks          (start methods fork and spawn)
//   process --- forkserver ---> launcher ---> ranks      (a launcher for each launch)
//
// One for each process that asks, kept until that ends; replaced when it has died. Launches do not depend on
// it once they have their launcher.
#pragma once

#include "ipc/launcher.hpp"

namespace accelmgr::launch {

/// The argument of this program executed as the forkserver.
inline constexpr const char* forkserver_argument = "--accelmgr-forkserver";

/// A launcher of its own for the caller, with the caller's standard streams and working directory. Throws
/// SystemError, SessionError when the forkserver does not answer.
ipc::LauncherClient launcher_from_forkserver();

/// Ends that of this process, if there is one; the next launch starts another. Bounded.
void end_forkserver() noexcept;

/// In this program executed as the forkserver.
[[noreturn]] void run_forkserver() noexcept;

}  // namespace accelmgr::launch
