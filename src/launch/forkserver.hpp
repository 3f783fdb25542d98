// The forkserver: this program executed anew, which does nothing but fork. Its image is as main() found it:
// no thread, no device context, and as small as it ever was.
//
//   process --- launch ---> launcher ---> ranks          (start methods fork and spawn)
//   process --- forkserver ---> launcher ---> ranks      (a launcher for each launch)
//   process --- forkserver ---> what serve_role() named
//
// One for each process that asks, kept until that ends; replaced when it has died. What it has forked does
// not depend on it.
#pragma once

#include <functional>

#include "base/unique_fd.hpp"
#include "ipc/launcher.hpp"

namespace accelmgr::launch {

/// The argument of this program executed as the forkserver.
inline constexpr const char* forkserver_argument = "--accelmgr-forkserver";

/// A launcher of its own for the caller, with the caller's standard streams and working directory. Throws
/// SystemError, SessionError when the forkserver does not answer.
ipc::LauncherClient launcher_from_forkserver();

/// What a process forked from the forkserver does; it does not return. `socket` is its end of a pair,
/// `creator` the pidfd of who asked for it.
using ServerRole = std::function<void(base::UniqueFd socket, base::UniqueFd creator)>;

/// In every process, before take_role(): what the forkserver's children of that name do.
void serve_role(const char* name, ServerRole role);

struct Served {
  base::UniqueFd socket;  ///< Our end.
  ipc::Child process;     ///< In a process group of its own. The forkserver reaps it.
  base::UniqueFd status;  ///< From which its wait status is read (an int), once it has ended.
};

/// Throws as launcher_from_forkserver().
Served fork_from_server(const char* role);

/// Ends that of this process, if there is one; the next launch starts another. Bounded.
void end_forkserver() noexcept;

/// In this program executed as the forkserver.
[[noreturn]] void run_forkserver() noexcept;

}  // namespace accelmgr::launch
