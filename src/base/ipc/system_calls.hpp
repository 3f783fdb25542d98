// Functions of newer C libraries than the one that a wheel requires (glibc 2.28), by their system calls.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

namespace accelmgr::ipc {

/// gettid(), since glibc 2.30.
inline pid_t thread_id() noexcept { return static_cast<pid_t>(syscall(SYS_gettid)); }

/// close_range(), since glibc 2.34.
inline long close_descriptors(unsigned first, unsigned last, unsigned flags = 0) noexcept {
  return syscall(SYS_close_range, first, last, flags);
}

}  // namespace accelmgr::ipc
