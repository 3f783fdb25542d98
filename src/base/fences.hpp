// Fences for processors that order less than x86 does; on x86 they cost nothing. The thread sanitizer knows
// no fences, and sees one process alone: there they hold the compiler only.
#pragma once

#include <atomic>

namespace accelmgr::base {

/// What the thread has loaded before is loaded before what it loads or stores afterwards.
inline void acquire_fence() noexcept {
#if defined(__SANITIZE_THREAD__)
  std::atomic_signal_fence(std::memory_order_acquire);
#else
  std::atomic_thread_fence(std::memory_order_acquire);
#endif
}

/// What the thread has loaded or stored before comes before what it stores afterwards.
inline void release_fence() noexcept {
#if defined(__SANITIZE_THREAD__)
  std::atomic_signal_fence(std::memory_order_release);
#else
  std::atomic_thread_fence(std::memory_order_release);
#endif
}

}  // namespace accelmgr::base
