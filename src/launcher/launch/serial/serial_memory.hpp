// The file of the locks of SerialExecutor: processes of one node that may do something only one at a time.
// The first process that needs the file makes it. Others find it by $ACCELMGR_SERIAL_MEMORY, or inherit it
// through fork().
#pragma once

#include <string>

namespace accelmgr::launch {

/// The value of $ACCELMGR_SERIAL_MEMORY for processes that this one launches: the path of the file that this
/// process uses. Makes the file if there is none. The path of a file made here is valid as long as this
/// process lives. Throws SystemError.
std::string serial_memory_path();

}  // namespace accelmgr::launch
