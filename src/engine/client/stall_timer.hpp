// Measures for how long a value has not changed.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/timing.hpp"

namespace accelmgr::client {

/// Counts only time in which this process ran: while it was stopped or starved, it observed nothing.
class StallTimer {
 public:
  /// Returns for how long `place` has been the same, in ns. Call it in intervals of at most
  /// timing::stall_look_ns: of a longer interval only so much counts.
  std::int64_t look(std::uint64_t place, std::int64_t now_ns) noexcept {
    stood_ns_ = looked_ns_ == 0 || place != place_
                    ? 0
                    : stood_ns_ + std::min(now_ns - looked_ns_, timing::stall_look_ns);
    place_ = place;
    looked_ns_ = now_ns;
    return stood_ns_;
  }

 private:
  std::uint64_t place_ = 0;
  std::int64_t looked_ns_ = 0;
  std::int64_t stood_ns_ = 0;
};

}  // namespace accelmgr::client
