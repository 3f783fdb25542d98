// Roles in which a test executes this program again: hosts that the test kills or misuses.
#pragma once

#include <string>

#include "accelmgr/config.hpp"
#include "role_process.hpp"

namespace accelmgr::test {

/// A host with the stage of its first argument and checkpoints in the second. It trains five steps, in which
/// a runner is killed. It saves, writes the checkpoint's path, waits for the test, and trains on to step 12.
inline constexpr const char* role_host = "host";
/// Calls init() while two more threads run, and writes the exception's text.
inline constexpr const char* role_inits_with_threads = "inits with threads";

/// Trains the staged model (BatchNorm, dropout) on a source without state(), by sgd with momentum. Lost
/// runners are replaced.
Config resumable_config(const std::string& stage_path, const std::string& directory);

}  // namespace accelmgr::test
