// What the processes of these tests do.
#pragma once

#include "accelmgr/launch.hpp"

namespace accelmgr::launch::test {

/// "tell": what the rank knows of itself. "fail": args[rank] says how; "hang" otherwise. "bytes": a text of
/// that many. "prepare": sets $PREPARED. "prepared": its value.
void register_functions();

/// Ends, or fails, as `how` says: "return", "throw", "throw nested", "exit 3", "kill 9", "hang".
Value obey(const std::string& how);

}  // namespace accelmgr::launch::test
