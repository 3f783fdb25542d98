// How the manager process, and a launcher in the place of a lost one, come to be: this program, run again
// with one argument.
#pragma once

namespace accelmgr::manager {

/// The argument that makes accelmgr::init() branch off into the manager, or into the launcher; and the
/// descriptor of its end of the socket to the host, or to the manager.
inline constexpr const char* role_argument = "--accelmgr-manager";
inline constexpr const char* launcher_argument = "--accelmgr-launcher";
inline constexpr int role_socket = 3;
inline constexpr int role_host = 4;  ///< The launcher's: the host's pidfd.

/// What the forkserver forks managers as.
inline constexpr const char* server_role = "manager";

/// Whether accelmgr::init() was called in this process.
bool initialized() noexcept;

}  // namespace accelmgr::manager
