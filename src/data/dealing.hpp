// Which element goes where: pure functions, so that loader, layout and tests cannot disagree.
//
// A dealing (session::Dealing) begins at some element and goes to a team of ranks: its elements, counted from
// 0, go to the team's ranks in turn, in ascending order, and fill each rank's batches one after the other.
// One batch of every rank is a round.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <span>

#include "session/step_word.hpp"

namespace accelmgr::data {

/// Where an element of a dealing lies.
struct Place {
  int rank;
  std::uint64_t batch;     ///< Counted from the rank's first of this dealing.
  std::uint64_t position;  ///< In the batch.
  bool operator==(const Place&) const = default;
};

constexpr std::uint64_t size_of(session::RankMask team) {
  return static_cast<std::uint64_t>(std::popcount(team));
}

/// Rank number `number`, counted from 0, of `team`.
constexpr int rank_of(std::uint64_t number, session::RankMask team) {
  for (; number > 0; --number) team &= team - 1;
  return std::countr_zero(team);
}

/// Of element `index` of the dealing; `team` is not empty.
constexpr Place place_of(std::uint64_t index, session::RankMask team, std::uint64_t batch_size) {
  const auto row = index / size_of(team);
  return {rank_of(index % size_of(team), team), row / batch_size, row % batch_size};
}

constexpr std::uint64_t round_elements(session::RankMask team, std::uint64_t batch_size) {
  return size_of(team) * batch_size;
}

/// The first element that is missing where the ranks of the team, in ascending order, hold their first
/// `rows[i]` elements each.
constexpr std::uint64_t first_missing(std::span<const std::uint64_t> rows) {
  std::uint64_t first = ~std::uint64_t{0};
  for (std::size_t i = 0; i < rows.size(); ++i) first = std::min(first, rows[i] * rows.size() + i);
  return first;
}

/// One past the last element that is there.
constexpr std::uint64_t end_of(std::span<const std::uint64_t> rows) {
  std::uint64_t end = 0;
  for (std::size_t i = 0; i < rows.size(); ++i)
    if (rows[i] > 0) end = std::max(end, (rows[i] - 1) * rows.size() + i + 1);
  return end;
}

/// Batch slots of a device's ring: those of the step under way, which are released only at its commit, and
/// enough for `prefetch` elements on top.
constexpr std::uint64_t batch_slots(int grad_accumulation_steps, int prefetch, int batch_size_per_device) {
  const auto accumulation = static_cast<std::uint64_t>(grad_accumulation_steps);
  const auto ahead = static_cast<std::uint64_t>(prefetch);
  const auto batch_size = static_cast<std::uint64_t>(batch_size_per_device);
  return accumulation + (ahead + batch_size - 1) / batch_size;
}

}  // namespace accelmgr::data
