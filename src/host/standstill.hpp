// For how long something has not moved.
#pragma once

#include <algorithm>
#include <cstdint>

namespace accelmgr::host {

/// Counts time in which this process ran: that it was stopped, or starved, proves nothing about others.
class Standstill {
 public:
  /// Between two looks, at most so much counts.
  static constexpr std::int64_t most_between_looks_ns = 200'000'000;

  /// For how long `place` has been the same, by now.
  std::int64_t look(std::uint64_t place, std::int64_t now_ns) noexcept {
    stood_ns_ = looked_ns_ == 0 || place != place_
                    ? 0
                    : stood_ns_ + std::min(now_ns - looked_ns_, most_between_looks_ns);
    place_ = place;
    looked_ns_ = now_ns;
    return stood_ns_;
  }

 private:
  std::uint64_t place_ = 0;
  std::int64_t looked_ns_ = 0;
  std::int64_t stood_ns_ = 0;
};

}  // namespace accelmgr::host
