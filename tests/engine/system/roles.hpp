// Roles of hosts that a test kills or misuses.
#pragma once

#include <string>
#include <vector>

#include "role_process.hpp"

namespace accelmgr::test {

/// Starts a manager without init(), and writes the exception's text.
inline constexpr const char* starts_without_init = "starts_without_init";
/// A host on the stage of arguments[0], with the start method of arguments[3]. It writes the pids of manager
/// and runners. If arguments[1] is "forks" it also forks a child and writes its pid. If arguments[2] is
/// "steps" it takes a step. Then it waits for the test.
inline constexpr const char* hosts = "hosts";

/// Plays the role and returns the exit code. `arguments` follow the role's name.
int play(const std::string& role, const std::vector<std::string>& arguments, int argc, char** argv);

}  // namespace accelmgr::test
