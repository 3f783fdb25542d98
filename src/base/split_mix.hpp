// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
#pragma once

#include <cstdint>

namespace accelmgr::base {

/// The finalizer: a bijection whose output bits all depend on all input bits.
constexpr std::uint64_t mix(std::uint64_t x) noexcept {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// The generator.
class SplitMix64 {
 public:
  static constexpr std::uint64_t gamma = 0x9e3779b97f4a7c15u;  ///< 2^64 / golden ratio, odd.

  explicit constexpr SplitMix64(std::uint64_t seed) noexcept : state_(seed) {}
  constexpr std::uint64_t next() noexcept { return mix(state_ += gamma); }

 private:
  std::uint64_t state_;
};

}  // namespace accelmgr::base
