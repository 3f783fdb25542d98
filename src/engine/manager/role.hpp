// How a manager process, and a fork server that replaces a lost one, are started: this program is executed
// again with one argument.
#pragma once

namespace accelmgr::manager {

/// The argument that makes accelmgr::init() run the manager or the fork server. role_socket is the descriptor
/// of the new process's socket: to the host for a manager, to the manager for a fork server.
inline constexpr const char* role_argument = "--accelmgr-manager";
inline constexpr const char* fork_server_argument = "--accelmgr-fork-server";
inline constexpr int role_socket = 3;
inline constexpr int role_host = 4;  ///< Of a fork server only: the pidfd of the host.

/// The role under which the zygote forks managers.
inline constexpr const char* server_role = "manager";

/// Whether init() or embed() was called in this process.
bool initialized() noexcept;

}  // namespace accelmgr::manager
