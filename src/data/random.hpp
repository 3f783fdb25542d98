// Random numbers that are the same on every machine and with every standard library (whose distributions are
// not).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace accelmgr::data {

/// The finalizer of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014):
/// a bijection whose output bits all depend on all input bits.
constexpr std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// SplitMix64. Cheap to make, so that whatever must depend on (seed, index) alone gets a generator of its
/// own.
class Random {
 public:
  /// Streams of different (seed, stream, index) have nothing to do with each other.
  explicit constexpr Random(std::uint64_t seed, std::uint64_t stream = 0, std::uint64_t index = 0)
      : state_(mix(mix(mix(seed + gamma) + stream + gamma) + index + gamma)) {}

  constexpr std::uint64_t next() { return mix(state_ += gamma); }

  /// Uniform in [0, bound); `bound` > 0. The bias of the remainder, bound / 2^64, is beyond observation here.
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

  /// Fisher and Yates.
  template <typename T>
  constexpr void shuffle(std::span<T> items) {
    for (std::size_t left = items.size(); left > 1; --left) std::swap(items[left - 1], items[below(left)]);
  }

 private:
  static constexpr std::uint64_t gamma = 0x9e3779b97f4a7c15u;  // 2^64 / golden ratio, odd
  std::uint64_t state_;
};

}  // namespace accelmgr::data
