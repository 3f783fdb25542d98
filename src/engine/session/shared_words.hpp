// Plain data in shared memory that one process writes word by word while others read it.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <optional>

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

/// Appends an entry to a ring that only one process writes. `recorded` counts the entry once it is whole: a
/// process that is killed before leaves nothing to mend. Entry number i, from 1, is at i mod `places`.
template <class Data, std::size_t places>
void append(SharedWords<Data> (&ring)[places], std::atomic<std::uint64_t>& recorded,
            const Data& data) noexcept {
  const auto number = recorded.load(std::memory_order_relaxed) + 1;
  store(ring[number % places], data);
  recorded.store(number, std::memory_order_release);
}

/// nullopt: the ring does not have that entry, or not any more. It has the last `places` - 1: the entry that
/// is being written has a place that no reader looks at.
template <class Data, std::size_t places>
std::optional<Data> entry(const SharedWords<Data> (&ring)[places], const std::atomic<std::uint64_t>& recorded,
                          std::uint64_t number) noexcept {
  const auto is_there = [&](std::uint64_t count) { return number <= count && count - number < places - 1; };
  if (number == 0 || !is_there(recorded.load(std::memory_order_acquire))) return std::nullopt;
  const auto data = load<Data>(ring[number % places]);
  if (!is_there(recorded.load(std::memory_order_acquire)))
    return std::nullopt;  // It may have been written meanwhile.
  return data;
}

}  // namespace accelmgr::session
