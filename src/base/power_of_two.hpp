// Numbers by which a multiplication only changes the exponent, so that it rounds nothing.
#pragma once

#include <cmath>

namespace accelmgr::base {

/// Whether `value` is 2^k for an integer k, which may be negative.
inline bool is_power_of_two(double value) noexcept {
  int exponent = 0;
  return std::isfinite(value) && std::frexp(value, &exponent) == 0.5;
}

}  // namespace accelmgr::base
