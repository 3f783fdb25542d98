// The cores that this process may use.
#pragma once

namespace accelmgr::ipc {

/// The number of cores on which the calling thread may run; 1 if the kernel does not tell.
int allowed_cores();

}  // namespace accelmgr::ipc
