// The zygote, from which the start method `forkserver` forks: this program executed again, as a process that
// does nothing but fork. It has no threads, no device context and little memory, so its forks are safe and
// cheap.
//
//   process --- launch ---> fork server ---> ranks   (start methods fork and spawn)
//   process --- zygote ---> fork server ---> ranks   (a fork server for each launch)
//   process --- zygote ---> a role of serve_role()
//
// Each process that asks gets a zygote of its own. It ends with that process; if it dies before, the next
// request starts another. Processes that it has forked do not depend on it.
#pragma once

#include <functional>

#include "base/unique_fd.hpp"
#include "ipc/fork_server_client.hpp"

namespace accelmgr::launch {

/// This program executed in a role gets an argument that names the role, and these descriptors: its end of a
/// socket pair, and the pidfd of the process that executed it.
inline constexpr const char* zygote_argument = "--accelmgr-zygote";
inline constexpr const char* fork_server_argument = "--accelmgr-forkserver";
inline constexpr int role_socket = 3;
inline constexpr int role_creator = 4;

/// Forks a new fork server, with the caller's standard streams and working directory. Throws SystemError, and
/// SessionError if the zygote does not answer.
ipc::ForkServerClient fork_server_from_zygote();

/// The main function of a process forked from the zygote; it does not return. `socket` is its end of a
/// socket pair, `creator` the pidfd of the process that asked for it.
using ServerRole = std::function<void(base::UniqueFd socket, base::UniqueFd creator)>;

/// Registers a role. Every process must register the same roles before it calls take_role(), because any
/// process may become the zygote.
void serve_role(const char* name, ServerRole role);

struct Served {
  base::UniqueFd socket;  ///< The caller's end of the pair.
  ipc::Child process;     ///< In a process group of its own. The zygote reaps it.
  base::UniqueFd status;  ///< A pipe. Its wait status (an int) can be read from it once it has ended.
};

/// Executes this program again in a role. The process is a child of this one, and so has no `status`. Throws
/// SystemError.
Served execute_in_role(const char* argument);

/// Forks a process with this role, with the caller's standard streams and working directory. Throws as
/// fork_server_from_zygote().
Served fork_from_zygote(const char* role);

/// Ends the zygote of this process, if there is one; the next request starts another. Blocks for a
/// bounded time.
void end_zygote() noexcept;

/// Called in this program executed as the zygote.
[[noreturn]] void run_zygote() noexcept;

}  // namespace accelmgr::launch
