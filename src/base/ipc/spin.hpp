// Waiting without a system call, for a change that another core is about to make.
#pragma once

#include <cstdint>

#include "base/clock.hpp"

namespace accelmgr::ipc {

/// Call this in every turn of a loop that spins.
inline void relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

/// Spins until ready() is true, for about `ns`. Returns whether it became true. Spinning without end is no
/// choice: three processes on two cores take 7,500 us then for what parked ones do in 46.
template <class Ready>
bool spin(Ready ready, std::int64_t ns) noexcept {
  constexpr int looks_per_clock = 32;  // The clock costs about as much as a few pauses.
  if (ready()) return true;
  if (ns <= 0) return false;
  std::int64_t until_ns = 0;
  for (;;) {
    for (int i = 0; i < looks_per_clock; ++i) {
      relax();
      if (ready()) return true;
    }
    const auto now_ns = base::now_ns();
    if (until_ns == 0) until_ns = now_ns + ns;
    if (now_ns >= until_ns) return false;
  }
}

}  // namespace accelmgr::ipc
