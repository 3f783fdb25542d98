// What this program does when a test executes it again: a process of its own, to be misused or killed.
#pragma once

#include <string>
#include <vector>

namespace accelmgr::test {

inline constexpr const char* role_argument = "--role";
/// Descriptors of a role: it writes to the test, and it blocks until the test closes its end of the other.
inline constexpr int role_says = 5;
inline constexpr int role_waits = 6;

/// Starts a manager without init(); says what that throws.
inline constexpr const char* starts_without_init = "starts_without_init";
/// Starts a manager with the stage of arguments[0] and says the pids of manager and runners, and of a child
/// that it forks if arguments[1] is "forks". Then it takes a step if arguments[2] is "steps", and waits. The
/// start method is arguments[3].
inline constexpr const char* hosts = "hosts";

/// Returns the exit code. `arguments`: after the role's name.
int play(const std::string& role, const std::vector<std::string>& arguments, int argc, char** argv);

}  // namespace accelmgr::test
