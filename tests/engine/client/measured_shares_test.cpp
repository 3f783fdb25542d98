// Tests of the rule by which micro-batches are divided over runners of different speed. All times are given:
// nothing here measures.
#include "engine/client/measured_shares.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

namespace accelmgr::client {
namespace {

using session::RankMask;
using Counts = std::vector<std::uint32_t>;

constexpr std::uint64_t per_ms = 1'000'000;

MicroBatchTimes times_of(const std::vector<std::uint64_t>& of_ranks) {
  MicroBatchTimes times{};
  std::ranges::copy(of_ranks, times.begin());
  return times;
}

Counts counts_of(const session::Shares& shares, std::size_t ranks) { return {shares.of, shares.of + ranks}; }

/// The least time in which `total` micro-batches can be computed, by trying all divisions.
std::uint64_t least_ns(const std::vector<std::uint64_t>& times, std::uint64_t total, std::size_t from = 0) {
  if (from + 1 == times.size()) return total * times[from];
  auto least = std::numeric_limits<std::uint64_t>::max();
  const auto others = times.size() - from - 1;
  for (std::uint64_t own = 1; own + others <= total; ++own)
    least = std::min(least, std::max(own * times[from], least_ns(times, total - own, from + 1)));
  return least;
}

RC_GTEST_PROP(BestShares, EndAsEarlyAsAnyDivisionCan, ()) {
  const auto ranks = *rc::gen::inRange<std::size_t>(1, 5);
  const auto times =
      *rc::gen::container<std::vector<std::uint64_t>>(ranks, rc::gen::inRange<std::uint64_t>(1, 60));
  const auto total = ranks + *rc::gen::inRange<std::uint64_t>(0, 16);
  const auto team = session::all_ranks(static_cast<int>(ranks));
  const auto shares = best_shares(team, total, times_of(times));
  RC_ASSERT(session::total_of(shares, team) == total);
  for (const auto share : counts_of(shares, ranks)) RC_ASSERT(share >= 1U);
  RC_ASSERT(compute_ns(shares, team, times_of(times)) == least_ns(times, total));
}

RC_GTEST_PROP(BestShares, AddUpForAnyTimesAndAnyNumber, ()) {
  const auto team = *rc::gen::inRange<RankMask>(1, session::all_ranks(session::max_ranks) + 1);
  MicroBatchTimes times{};
  for (auto& time : times) time = std::uint64_t{1} << *rc::gen::inRange(0, 45);
  const auto each = *rc::gen::inRange<std::uint64_t>(1, std::uint64_t{1} << 20);
  const auto total = each * static_cast<std::uint64_t>(std::popcount(team));
  const auto shares = best_shares(team, total, times);
  RC_ASSERT(session::total_of(shares, team) == total);
  for (int rank = 0; rank < session::max_ranks; ++rank)
    RC_ASSERT((shares.of[rank] >= 1) == ((team >> rank & 1) != 0));
}

/// Ranks whose times the test sets.
class Team {
 public:
  Team(int each, const std::vector<std::uint64_t>& times)
      : ranks_(times.size()), shares_(each), times_(times_of(times)) {
    shares_.shares_for(team());
  }
  void set(std::size_t rank, std::uint64_t time) { times_[rank] = time; }
  /// Makes so many steps. Returns how often the shares changed.
  int steps(int count) {
    int changes = 0;
    for (int i = 0; i < count; ++i) changes += shares_.note(times_) ? 1 : 0;
    return changes;
  }
  Counts shares() { return counts_of(shares_.shares_for(team()), ranks_); }

 private:
  RankMask team() const { return session::all_ranks(static_cast<int>(ranks_)); }

  std::size_t ranks_;
  MeasuredShares shares_;
  MicroBatchTimes times_;
};

TEST(MeasuredShares, AreEvenUntilAWindowIsFullOfStepsInWhichAllRanksComputed) {
  Team team(4, {10 * per_ms, 30 * per_ms});
  EXPECT_EQ(team.steps(MeasuredShares::window - 1), 0);
  EXPECT_EQ(team.shares(), (Counts{4, 4}));
  team.set(1, 0);
  EXPECT_EQ(team.steps(3), 0);
  team.set(1, 30 * per_ms);
  EXPECT_EQ(team.steps(1), 1);
  EXPECT_EQ(team.shares(), (Counts{6, 2}));
}

TEST(MeasuredShares, AGainBelowTheLimitChangesNothingAndOneAtTheLimitDoes) {
  Team below(20, {100 * per_ms, 120 * per_ms});  // 22 to 18 ends at 2200 ms instead of 2400.
  EXPECT_EQ(below.steps(50), 0);
  Team above(20, {100 * per_ms, 130 * per_ms});  // 23 to 17 ends at 2300 ms instead of 2600.
  EXPECT_EQ(above.steps(50), 1);
  EXPECT_EQ(above.shares(), (Counts{23, 17}));
}

TEST(MeasuredShares, ASpeedThatSwingsAroundTheLimitMovesThemOnce) {
  Team team(20, {100 * per_ms, 130 * per_ms});
  int changes = 0;
  for (int i = 0; i < 100; ++i) {
    team.set(1, (i % 2 == 0 ? 130 : 115) * per_ms);
    changes += team.steps(MeasuredShares::window);
  }
  EXPECT_EQ(changes, 1);
}

TEST(MeasuredShares, FollowARunnerThatBecomesSlowAndFastAgain) {
  Team team(4, {10 * per_ms, 10 * per_ms});
  EXPECT_EQ(team.steps(20), 0);
  team.set(0, 30 * per_ms);
  EXPECT_EQ(team.steps(20), 1);
  EXPECT_EQ(team.shares(), (Counts{2, 6}));
  team.set(0, 10 * per_ms);
  EXPECT_EQ(team.steps(20), 1);
  EXPECT_EQ(team.shares(), (Counts{4, 4}));
}

TEST(MeasuredShares, AWarmUpOfTwoStepsAndALaterHiccupMoveNothing) {
  Team team(4, {900 * per_ms, 10 * per_ms});
  EXPECT_EQ(team.steps(2), 0);
  team.set(0, 10 * per_ms);
  EXPECT_EQ(team.steps(20), 0);
  team.set(1, 5000 * per_ms);
  EXPECT_EQ(team.steps(1), 0);
  team.set(1, 10 * per_ms);
  EXPECT_EQ(team.steps(20), 0);
}

TEST(MeasuredShares, ATeamOfKnownRanksBeginsWithItsBestSharesAndAnyOtherWithEvenOnes) {
  MeasuredShares shares(4);
  const auto times = times_of({10 * per_ms, 20 * per_ms, 10 * per_ms});
  shares.shares_for(0b111);
  for (int i = 0; i < MeasuredShares::window; ++i) shares.note(times);
  EXPECT_EQ(counts_of(shares.shares_for(0b111), 3), (Counts{5, 2, 5}));
  EXPECT_EQ(counts_of(shares.shares_for(0b011), 3), (Counts{6, 2, 0}));
  EXPECT_EQ(counts_of(shares.shares_for(0b1011), 4), (Counts{4, 4, 0, 4}));
}

TEST(MeasuredShares, WhatWasNotedOfATeamDoesNotCountForAnother) {
  MeasuredShares shares(4);
  const auto times = times_of({10 * per_ms, 30 * per_ms, 10 * per_ms});
  shares.shares_for(0b011);
  for (int i = 0; i < MeasuredShares::window - 1; ++i) EXPECT_FALSE(shares.note(times));
  shares.shares_for(0b111);
  for (int i = 0; i < MeasuredShares::window - 1; ++i) EXPECT_FALSE(shares.note(times));
  EXPECT_TRUE(shares.note(times));
}

}  // namespace
}  // namespace accelmgr::client
