// The zygote, from which the start method `forkserver` forks: this program executed again, as a process that
// does nothing but fork. It has no threads, no device context and little memory, so its forks are safe and
// cheap.
//
//   process --- launch ---> fork server ---> ranks   (start methods fork and spawn)
//   process --- zygote ---> fork server ---> ranks   (a fork server for each launch)
//   process --- zygote ---> managers, and whatever else is a forked role (roles.hpp)
//
// Each process that asks gets a zygote of its own. It ends with that process; if it dies before, the next
// request starts another. Processes that it has forked do not depend on it.
#pragma once

#include "base/ipc/process.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::ipc {

/// This program executed in a role gets an argument that names the role, and these descriptors: its end of a
/// socket pair, and the pidfd of the process that executed it.
inline constexpr const char* zygote_argument = "--accelmgr-zygote";
inline constexpr int role_socket = 3;
inline constexpr int role_creator = 4;

struct Served {
  base::UniqueFd socket;  ///< The caller's end of the pair.
  Child process;          ///< In a process group of its own. The zygote reaps it.
  base::UniqueFd status;  ///< A pipe that gives the process's wait status (an int) once it has ended.
};

/// For a process in a role: programs that it executes do not get the role's descriptors.
void keep_role_descriptors() noexcept;

/// Executes this program again in a role (roles.hpp). The process is a child of this one, and so has no
/// `status`. Throws SystemError.
Served execute_in_role(const char* argument);

/// Forks a process in this forked role, with the caller's standard streams and working directory. Throws
/// SystemError, and SessionError if the zygote does not answer.
Served fork_from_zygote(const char* role);

/// Ends the zygote of this process, if there is one; the next request starts another. Blocks for a
/// bounded time.
void end_zygote() noexcept;

}  // namespace accelmgr::ipc
