// How the manager process comes to be: this program, run again with one argument.
#pragma once

namespace accelmgr::manager {

/// The argument that makes accelmgr::init() branch off into the manager, and the descriptor of its end of the
/// socket to the host.
inline constexpr const char* role_argument = "--accelmgr-manager";
inline constexpr int role_socket = 3;

/// Whether accelmgr::init() was called in this process.
bool initialized() noexcept;

}  // namespace accelmgr::manager
