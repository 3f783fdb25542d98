// float16 and bfloat16 by their definition, one number at a time. Tests compare the kernels with them.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace accelmgr::test {

struct Float16 {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

inline float from_half(BFloat16 v) { return std::bit_cast<float>(std::uint32_t{v.bits} << 16); }

inline float from_half(Float16 v) {
  const int exponent = v.bits >> 10 & 0x1f;
  const int fraction = v.bits & 0x3ff;
  // The same fields in a float32, whose exponents are counted from a number that is larger by 112.
  float magnitude = std::bit_cast<float>((v.bits & 0x7fffu) << 13) * 0x1p112f;
  if (exponent == 0x1f) magnitude = fraction == 0 ? std::numeric_limits<float>::infinity() : std::nanf("");
  return std::copysign(magnitude, (v.bits & 0x8000) != 0 ? -1.0f : 1.0f);
}

/// The largest 16-bit number that is not above a finite magnitude, as bits.
inline std::uint16_t truncated(float magnitude, BFloat16) {
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(magnitude) >> 16);
}
inline std::uint16_t truncated(float magnitude, Float16) {
  if (magnitude < 0x1p-14f) return static_cast<std::uint16_t>(magnitude * 0x1p24f);
  return static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(magnitude) >> 13) - (112 << 10));
}

/// Rounds to the nearest number, ties to even. Infinity takes the place of the number that would follow the
/// largest one.
template <class Half>
Half to_half(float value) {
  constexpr std::uint16_t infinity = std::is_same_v<Half, Float16> ? 0x7c00 : 0x7f80;
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const auto half = [sign](std::uint16_t bits) { return Half{static_cast<std::uint16_t>(bits | sign)}; };
  if (std::isnan(value)) return half(infinity | 1);
  const double magnitude = std::fabs(static_cast<double>(value));
  const auto exact = [](std::uint16_t bits) {
    if (bits != infinity) return static_cast<double>(from_half(Half{bits}));
    return std::ldexp(1.0, std::is_same_v<Half, Float16> ? 16 : 128);
  };
  if (magnitude >= exact(infinity)) return half(infinity);
  const auto below = truncated(std::fabs(value), Half{});
  const auto above = static_cast<std::uint16_t>(below + 1);
  const double down = magnitude - exact(below), up = exact(above) - magnitude;
  if (down != up) return half(down < up ? below : above);
  return half(below % 2 == 0 ? below : above);
}

}  // namespace accelmgr::test
