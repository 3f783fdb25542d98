#include "engine/data/sharding.hpp"

#include <algorithm>

namespace accelmgr::data {

RoundRobin::RoundRobin(const session::Assignment& to, std::uint64_t batch_size)
    : to_(to), batch_size_(batch_size) {
  std::uint64_t first_round = 0;
  for (auto ranks = to.team; ranks != 0;) {
    all_rounds_[kinds_of_rounds_++] = {ranks, first_round, step_elements_};
    auto end_round = ~std::uint64_t{0};
    for (auto rest = ranks; rest != 0; rest &= rest - 1)
      end_round = std::min<std::uint64_t>(end_round, to.shares.of[std::countr_zero(rest)]);
    step_elements_ += (end_round - first_round) * size_of(ranks) * batch_size;
    first_round = end_round;
    for (auto rest = ranks; rest != 0; rest &= rest - 1)
      if (to.shares.of[std::countr_zero(rest)] == end_round) ranks &= ~(rest & -rest);
  }
}

const RoundRobin::Rounds& RoundRobin::rounds_at(std::uint64_t element_of_step) const noexcept {
  auto at = kinds_of_rounds_ - 1;
  while (all_rounds_[at].first_element > element_of_step) --at;
  return all_rounds_[at];
}

const RoundRobin::Rounds& RoundRobin::rounds_of(std::uint64_t round) const noexcept {
  auto at = kinds_of_rounds_ - 1;
  while (all_rounds_[at].first_round > round) --at;
  return all_rounds_[at];
}

Place RoundRobin::place_of(std::uint64_t index) const noexcept {
  if (even()) {  // Where a step ends does not matter, and the loader asks for every element.
    const auto row = index / size_of(to_.team);
    return {rank_of(index % size_of(to_.team), to_.team), row / batch_size_, row % batch_size_};
  }
  const auto step = index / step_elements_, of_step = index % step_elements_;
  const auto& rounds = rounds_at(of_step);
  const auto of_rounds = of_step - rounds.first_element;
  const auto row = of_rounds / size_of(rounds.ranks);
  const auto rank = rank_of(of_rounds % size_of(rounds.ranks), rounds.ranks);
  return {rank, step * to_.shares.of[rank] + rounds.first_round + row / batch_size_, row % batch_size_};
}

std::uint64_t RoundRobin::index_of(const Place& place) const noexcept {
  const std::uint64_t share = to_.shares.of[place.rank];
  const auto step = place.batch / share, round = place.batch % share;
  const auto& rounds = rounds_of(round);
  const auto before = rounds.ranks & ((session::RankMask{1} << place.rank) - 1);
  const auto row = (round - rounds.first_round) * batch_size_ + place.position;
  return step * step_elements_ + rounds.first_element + row * size_of(rounds.ranks) + size_of(before);
}

bool RoundRobin::begins_round(const Place& place) const noexcept {
  if (place.position != 0) return false;
  return place.rank == rank_of(0, rounds_of(place.batch % to_.shares.of[place.rank]).ranks);
}

std::uint64_t RoundRobin::index_of_row(int rank, std::uint64_t row) const noexcept {
  return index_of({rank, row / batch_size_, row % batch_size_});
}

std::uint64_t RoundRobin::first_missing(std::span<const std::uint64_t> rows) const noexcept {
  std::uint64_t first = ~std::uint64_t{0};
  for (std::size_t i = 0; i < rows.size(); ++i)
    first = std::min(first, index_of_row(rank_of(i, to_.team), rows[i]));
  return first;
}

std::uint64_t RoundRobin::end_of(std::span<const std::uint64_t> rows) const noexcept {
  std::uint64_t end = 0;
  for (std::size_t i = 0; i < rows.size(); ++i)
    if (rows[i] > 0) end = std::max(end, index_of_row(rank_of(i, to_.team), rows[i] - 1) + 1);
  return end;
}

}  // namespace accelmgr::data
