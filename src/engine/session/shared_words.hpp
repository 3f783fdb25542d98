// Plain data in shared memory that one process writes word by word while others read it.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>

#include "engine/session/layout.hpp"

namespace accelmgr::session {

/// Each store releases: a reader that sees a word sees everything that was stored before it, too.
template <class Data>
void store(SharedWords<Data>& words, const Data& data) noexcept {
  const auto plain = std::bit_cast<std::array<std::uint64_t, sizeof data / sizeof(std::uint64_t)>>(data);
  for (std::size_t i = 0; i < plain.size(); ++i) words[i].store(plain[i], std::memory_order_release);
}

template <class Data>
Data load(const SharedWords<Data>& words) noexcept {
  std::array<std::uint64_t, sizeof(Data) / sizeof(std::uint64_t)> plain;
  for (std::size_t i = 0; i < plain.size(); ++i) plain[i] = words[i].load(std::memory_order_acquire);
  return std::bit_cast<Data>(plain);
}

}  // namespace accelmgr::session
