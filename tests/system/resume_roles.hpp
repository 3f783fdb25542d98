// What this program does when a test executes it again: a process of its own, to be misused or killed.
#pragma once

#include <string>

#include "accelmgr/config.hpp"

namespace accelmgr::test {

/// Descriptors of a role: it writes to the test, and it blocks until the test closes its end of the other.
inline constexpr int role_says = 5;
inline constexpr int role_waits = 6;

/// With the stage of argv[2], checkpoints in argv[3]: trains five steps, in which a runner is killed; saves
/// and says the path; waits; goes on to step 12.
inline constexpr const char* role_host = "--host";
/// Calls init() with two more threads running; says what that throws.
inline constexpr const char* role_inits_with_threads = "--inits-with-threads";

/// The staged model (BatchNorm, dropout) on a source without state(), trained by sgd with momentum; lost
/// runners are replaced.
Config resumable_config(const std::string& stage_path, const std::string& directory);

}  // namespace accelmgr::test
