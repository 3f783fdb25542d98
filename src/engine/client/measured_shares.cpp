#include "engine/client/measured_shares.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace accelmgr::client {
namespace {

template <class Visit>
void for_each_rank(session::RankMask team, Visit&& visit) {
  for (; team != 0; team &= team - 1) visit(static_cast<std::size_t>(std::countr_zero(team)));
}

}  // namespace

std::uint64_t compute_ns(const session::Shares& shares, session::RankMask team,
                         const MicroBatchTimes& times) {
  std::uint64_t longest = 0;
  for_each_rank(team, [&](std::size_t rank) { longest = std::max(longest, shares.of[rank] * times[rank]); });
  return longest;
}

// Each micro-batch goes to the rank that would end it first. So the completion times are the `total` smallest
// ones that there are, and no division ends earlier. Those up to `certain_ns` are among them, because until
// then all ranks together end at most `total` - `ranks`: these micro-batches are given at once. The others,
// at most two for each rank, are given one by one.
session::Shares best_shares(session::RankMask team, std::uint64_t total, const MicroBatchTimes& times) {
  double speed = 0;  // Micro-batches per nanosecond.
  for_each_rank(team, [&](std::size_t rank) { speed += 1.0 / double(times[rank]); });
  const auto ranks = static_cast<std::uint64_t>(std::popcount(team));
  const double certain_ns = double(total - ranks) / speed;
  session::Shares shares{};
  std::uint64_t given = 0;
  for_each_rank(team, [&](std::size_t rank) {
    const auto share = std::max(1.0, std::floor(certain_ns / double(times[rank])));
    given += shares.of[rank] = static_cast<std::uint32_t>(share);
  });
  for (; given < total; ++given) {
    auto first_ns = std::numeric_limits<std::uint64_t>::max();
    std::size_t first = 0;
    for_each_rank(team, [&](std::size_t rank) {
      const auto end_ns = (shares.of[rank] + std::uint64_t{1}) * times[rank];
      if (end_ns >= first_ns) return;
      first_ns = end_ns;
      first = rank;
    });
    ++shares.of[first];
  }
  return shares;
}

std::uint64_t MeasuredShares::total() const noexcept {
  return each_ * static_cast<std::uint64_t>(std::popcount(team_));
}

const session::Shares& MeasuredShares::shares_for(session::RankMask team) {
  if (team == team_) return shares_;
  team_ = team;
  steps_ = 0;
  shares_ = {};
  bool all_known = true;
  for_each_rank(team, [&](std::size_t rank) {
    shares_.of[rank] = static_cast<std::uint32_t>(each_);
    all_known = all_known && known_[rank] != 0;
  });
  if (all_known) shares_ = best_shares(team_, total(), known_);
  return shares_;
}

bool MeasuredShares::note(const MicroBatchTimes& times) {
  bool complete = true;
  for_each_rank(team_, [&](std::size_t rank) { complete = complete && times[rank] != 0; });
  if (!complete) return false;
  noted_[static_cast<std::size_t>(steps_)] = times;
  if (++steps_ < window) return false;
  steps_ = 0;
  take_medians();
  const auto best = best_shares(team_, total(), known_);
  const auto now_ns = double(compute_ns(shares_, team_, known_));
  if (now_ns < least_gain * double(compute_ns(best, team_, known_))) return false;
  shares_ = best;
  return true;
}

void MeasuredShares::take_medians() {
  for_each_rank(team_, [&](std::size_t rank) {
    std::array<std::uint64_t, window> of_rank{};
    for (std::size_t i = 0; i < of_rank.size(); ++i) of_rank[i] = noted_[i][rank];
    std::ranges::nth_element(of_rank, of_rank.begin() + window / 2);
    known_[rank] = of_rank[window / 2];
  });
}

}  // namespace accelmgr::client
