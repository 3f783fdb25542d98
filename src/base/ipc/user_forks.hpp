// What children that user code forks do not get: locks and sockets on whose end another process waits,
// because a child may outlive this process, and handlers of signals that are meant for this process. (What is
// executed gets neither.)
#pragma once

#include <span>

namespace accelmgr::ipc {

/// From now on children that this process forks close `fd` at once. Any thread. Throws SystemError if
/// there are too many.
void close_in_forks(int fd);
/// Undoes close_in_forks(). Call it before `fd` is closed: its number may be another file's then. Any thread.
void keep_in_forks(int fd) noexcept;

/// From now on these signals have their default actions in children that this process forks, unless their
/// handlers change until then: TERM ends a worker of a data loader, and nobody else. Call it once, on one
/// thread.
void default_in_forks(std::span<const int> signals);

}  // namespace accelmgr::ipc
