// Roles in which a test executes this program again: hosts that the test kills or misuses.
#pragma once

#include <string>

#include "accelmgr/config.hpp"

namespace accelmgr::test {

/// Descriptors of a role. It writes to the test through one, and reads from the other until the test closes
/// its end.
inline constexpr int role_says = 5;
inline constexpr int role_waits = 6;

/// A host with the stage of argv[2] and checkpoints in argv[3]. It trains five steps, in which a runner is
/// killed. It saves, writes the checkpoint's path, waits for the test, and trains on to step 12.
inline constexpr const char* role_host = "--host";
/// Calls init() while two more threads run, and writes the exception's text.
inline constexpr const char* role_inits_with_threads = "--inits-with-threads";

/// Trains the staged model (BatchNorm, dropout) on a source without state(), by sgd with momentum. Lost
/// runners are replaced.
Config resumable_config(const std::string& stage_path, const std::string& directory);

}  // namespace accelmgr::test
