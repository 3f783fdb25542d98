// The heap of malloc in which large blocks stay.
#pragma once

#include <functional>

namespace accelmgr::ipc {

/// Calls `body` on a thread that allocates from the main heap of malloc, and blocks until it has returned: on
/// the calling thread if that allocates there, else on a new one. Throws what `body` throws, and SystemError
/// if no thread can be started.
///
/// Threads other than a process's first one have further heaps by default. Those cannot hold a block of 64
/// MiB, and give smaller ones back to the kernel as they become free, whatever mallopt() was told: a thread
/// that computes there gets zeroed pages for its gradients in each step. A thread keeps the heap of its first
/// allocation. In a fork, new threads get the heaps of the threads that are gone, the main heap last. With
/// another malloc than glibc's, `body` runs on any thread.
void on_main_heap(const std::function<void()>& body);

}  // namespace accelmgr::ipc
