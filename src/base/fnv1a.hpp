// FNV-1a: a hash for short texts and a few numbers. Unlike std::hash it is the same in every build. Contents
// of files have a faster one (engine/checkpoint/checksum.hpp).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string_view>

namespace accelmgr::base {
namespace fnv1a_constants {
inline constexpr std::uint64_t begin = 0xcbf29ce484222325u;
inline constexpr std::uint64_t prime = 0x100000001b3u;
}  // namespace fnv1a_constants

constexpr std::uint64_t fnv1a(std::string_view text) noexcept {
  std::uint64_t hash = fnv1a_constants::begin;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * fnv1a_constants::prime;
  return hash;
}

/// Hashes each number as a whole, not byte by byte.
constexpr std::uint64_t fnv1a(std::initializer_list<std::uint64_t> numbers) noexcept {
  std::uint64_t hash = fnv1a_constants::begin;
  for (const auto number : numbers) hash = (hash ^ number) * fnv1a_constants::prime;
  return hash;
}

}  // namespace accelmgr::base
