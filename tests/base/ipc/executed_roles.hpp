// The roles of the processes that tests start with execute_self(). A role talks to its test over the
// descriptor `role_socket`.
#pragma once

#include <string>

namespace accelmgr::ipc::test {

inline constexpr const char* role_argument = "--role";
inline constexpr int role_socket = 7;
inline constexpr int role_exit_code = 5;

int play(const std::string& role);

/// The numbers of the open descriptors of this process, as in "0 1 2 7".
std::string open_descriptors();

}  // namespace accelmgr::ipc::test
