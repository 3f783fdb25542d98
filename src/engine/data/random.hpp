// Random numbers that are the same on every machine and with every standard library; the distributions of the
// standard library are not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "base/split_mix.hpp"

namespace accelmgr::data {

/// SplitMix64. Cheap to construct: every value that must depend on (seed, index) alone gets its own
/// generator.
class Random {
 public:
  /// Streams of different (seed, stream, index) are independent.
  explicit constexpr Random(std::uint64_t seed, std::uint64_t stream = 0, std::uint64_t index = 0)
      : generator_(base::mix(base::mix(base::mix(seed + gamma) + stream + gamma) + index + gamma)) {}

  constexpr std::uint64_t next() { return generator_.next(); }

  /// Uniform in [0, bound); `bound` > 0. The bias of the remainder, bound / 2^64, is too small to matter
  /// here.
  constexpr std::uint64_t below(std::uint64_t bound) { return next() % bound; }

  /// Close to the standard normal distribution: the sum of four uniform numbers of 16 bits, scaled to
  /// variance 1. One draw and no transcendental function, because synthetic data must not compete with the
  /// runners for the processor.
  constexpr float normal() {
    constexpr float mean = 2.0F * 65535.0F;
    constexpr float deviation = 37837.2F;  // 65536 / sqrt(12) * sqrt(4)
    const std::uint64_t bits = next();
    const auto sum = static_cast<std::uint32_t>((bits & 0xffff) + ((bits >> 16) & 0xffff) +
                                                ((bits >> 32) & 0xffff) + (bits >> 48));
    return (static_cast<float>(sum) - mean) / deviation;
  }

  /// Fisher-Yates shuffle.
  template <typename T>
  constexpr void shuffle(std::span<T> items) {
    for (std::size_t left = items.size(); left > 1; --left) std::swap(items[left - 1], items[below(left)]);
  }

 private:
  static constexpr auto gamma = base::SplitMix64::gamma;
  base::SplitMix64 generator_;
};

}  // namespace accelmgr::data
