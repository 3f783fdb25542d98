// The functions that the ranks of these tests call.
#pragma once

#include "accelmgr/launch.hpp"

namespace accelmgr::launch::test {

/// Registers these functions. "tell": returns the rank's arguments and variables. "obey": does what
/// args[rank] says. "bytes": returns a text of args[0] bytes. "prepare": sets $PREPARED.
void register_functions();

/// Does what `how` says: "throw", "throw nested DEPTH", "exit 3", "kill 9", "hang" and others; returns any
/// other text.
Value obey(const std::string& how);

}  // namespace accelmgr::launch::test
