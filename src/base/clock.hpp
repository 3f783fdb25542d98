// Monotonic time, from one clock for all processes of a machine.
#pragma once

#include <time.h>

#include <algorithm>
#include <cstdint>

namespace accelmgr::base {

/// CLOCK_MONOTONIC in nanoseconds: comparable between processes.
inline std::int64_t now_ns() noexcept {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

/// A point in time after which a wait ends.
class Deadline {
 public:
  /// Has passed at once unless `seconds` is above 0 (NaN is not). Infinity becomes 127 years.
  static Deadline in_seconds(double seconds) noexcept {
    const double wait_s = seconds > 0 ? std::min(seconds, longest_wait_s) : 0;
    return Deadline(now_ns() + static_cast<std::int64_t>(wait_s * 1e9));
  }
  static Deadline at_ns(std::int64_t ns) noexcept { return Deadline(ns); }
  std::int64_t remaining_ns() const noexcept { return at_ns_ - now_ns(); }
  bool passed() const noexcept { return remaining_ns() <= 0; }
  std::int64_t ns() const noexcept { return at_ns_; }

 private:
  static constexpr double longest_wait_s = 4e9;  // 127 years: now_ns() plus this fits 64 bits.

  explicit Deadline(std::int64_t at_ns) noexcept : at_ns_(at_ns) {}
  std::int64_t at_ns_;
};

inline Deadline earlier(Deadline a, Deadline b) noexcept { return a.ns() < b.ns() ? a : b; }

}  // namespace accelmgr::base
