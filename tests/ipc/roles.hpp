// What a process executed by execute_self() does in these tests; its socket is descriptor `role_socket`.
#pragma once

#include <string>

namespace accelmgr::ipc::test {

inline constexpr const char* role_argument = "--role";
inline constexpr int role_socket = 7;
inline constexpr int role_exit_code = 5;

int play(const std::string& role);

/// The open descriptors of this process: "0 1 2 7".
std::string open_descriptors();

}  // namespace accelmgr::ipc::test
