// The time of day, for what people read and for other machines. For waits there is base/clock.hpp.
#pragma once

#include <time.h>

#include <cstdint>

namespace accelmgr::base {

/// CLOCK_REALTIME in nanoseconds.
inline std::int64_t real_time_ns() noexcept {
  timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

}  // namespace accelmgr::base
