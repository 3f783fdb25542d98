#include "engine/data/sharding.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <random>
#include <vector>

namespace accelmgr::data {
namespace {

using session::RankMask;

RoundRobin even(RankMask team, std::uint64_t batch_size, std::uint32_t each = 1) {
  return {{team, session::even_shares(each)}, batch_size};
}

RoundRobin uneven(RankMask team, const std::vector<std::uint32_t>& shares, std::uint64_t batch_size) {
  session::Assignment to{team, {}};
  std::ranges::copy(shares, to.shares.of);
  return {to, batch_size};
}

TEST(Sharding, ElementIGoesToRankNumberIModNOfTheTeam) {
  EXPECT_EQ(rank_of(0, 0b111), 0);
  EXPECT_EQ(rank_of(2, 0b111), 2);
  EXPECT_EQ(rank_of(0, 0b101000), 3);
  EXPECT_EQ(rank_of(1, 0b101000), 5);
  EXPECT_EQ(even(0b111, 4).place_of(3).rank, 0);
  EXPECT_EQ(even(0b101000, 4).place_of(3).rank, 5);
  EXPECT_EQ(even(0b100, 4).place_of(7).rank, 2);
}

TEST(Sharding, ElementNumbersBeyond32BitsKeepTheirPlace) {
  EXPECT_EQ(even(0xffffff, 1).place_of(std::uint64_t{1} << 40).rank,
            static_cast<int>((std::uint64_t{1} << 40) % 24));
  EXPECT_EQ(even(0b11, 4).place_of(UINT64_MAX), (Place{1, UINT64_MAX / 8, 3}));
}

TEST(Sharding, HowManyMicroBatchesAStepHasDoesNotMatterWhenTheyAreEven) {
  for (const RankMask team : {0b1U, 0b1011U, 0b110000000000U})
    for (const std::uint64_t batch_size : {1U, 3U})
      for (const std::uint32_t each : {2U, 5U, 1U << 20})
        for (std::uint64_t i = 0; i < 100; ++i) {
          const auto order = even(team, batch_size, each);
          EXPECT_EQ(order.place_of(i), even(team, batch_size).place_of(i));
          EXPECT_EQ(order.begins_round(order.place_of(i)), i % (size_of(team) * batch_size) == 0);
        }
}

TEST(Sharding, ARankThatHasItsShareOfAStepIsPassedOver) {
  const auto order = uneven(0b111, {1, 3, 2}, 2);
  EXPECT_EQ(order.step_elements(), 12U);
  std::vector<int> ranks, begins;
  for (std::uint64_t i = 0; i < 12; ++i) {
    ranks.push_back(order.place_of(i).rank);
    if (order.begins_round(order.place_of(i))) begins.push_back(static_cast<int>(i));
  }
  EXPECT_EQ(ranks, (std::vector<int>{0, 1, 2, 0, 1, 2, 1, 2, 1, 2, 1, 1}));
  EXPECT_EQ(begins, (std::vector<int>{0, 6, 10}));
  EXPECT_EQ(order.place_of(11), (Place{1, 2, 1}));
  EXPECT_EQ(order.place_of(12), (Place{0, 1, 0}));
  EXPECT_EQ(order.place_of(13), (Place{1, 3, 0}));
}

TEST(Sharding, EveryPlaceHoldsOneElementInOrderAndAStepIsWholeWhateverTheShares) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    const RankMask team = random() % 31 + 1;
    const std::uint64_t batch_size = random() % 3 + 1;
    std::vector<std::uint32_t> shares(5);
    for (auto& share : shares) share = random() % 6 + 1;
    const auto order = uneven(team, shares, batch_size);
    std::array<std::uint64_t, 5> rows{};
    for (std::uint64_t i = 0; i < 3 * order.step_elements(); ++i) {
      const auto place = order.place_of(i);
      ASSERT_EQ(order.index_of(place), i);
      auto& row = rows.at(static_cast<std::size_t>(place.rank));
      ASSERT_EQ(place.batch * batch_size + place.position, row) << "element " << i;
      ++row;
      if ((i + 1) % order.step_elements() != 0) continue;
      for (std::size_t rank = 0; rank < 5; ++rank)
        ASSERT_EQ(rows.at(rank),
                  (team >> rank & 1) * (i + 1) / order.step_elements() * shares[rank] * batch_size);
    }
  }
}

TEST(Sharding, WhatIsMissingAndWhereItEndsFollowFromTheRows) {
  for (const auto& order : {even(0b111, 2), uneven(0b111, {1, 3, 2}, 2), uneven(0b111, {4, 1, 4}, 1)}) {
    std::array<std::uint64_t, 3> rows{};
    for (std::uint64_t elements = 0; elements < 40; ++elements) {
      EXPECT_EQ(order.first_missing(rows), elements);
      EXPECT_EQ(order.end_of(rows), elements);
      ++rows.at(static_cast<std::size_t>(order.place_of(elements).rank));
    }
  }
}

TEST(Sharding, ABatchThatWasNotPublishedIsMissingWhereItBegins) {
  EXPECT_EQ(even(0b111, 4).first_missing(std::array<std::uint64_t, 3>{8, 4, 7}), 13U);
  EXPECT_EQ(even(0b111, 4).end_of(std::array<std::uint64_t, 3>{8, 4, 7}), 22U);
  EXPECT_EQ(even(0b100, 4).first_missing(std::array<std::uint64_t, 1>{4}), 4U);
  const auto order = uneven(0b11, {1, 3}, 2);
  EXPECT_EQ(order.first_missing(std::array<std::uint64_t, 2>{2, 4}), 6U);
  EXPECT_EQ(order.first_missing(std::array<std::uint64_t, 2>{4, 4}), 6U);
  EXPECT_EQ(order.end_of(std::array<std::uint64_t, 2>{4, 4}), 11U);
}

TEST(Sharding, ARingHoldsTheStepUnderWayAndPrefetchRoundedUpToBatches) {
  EXPECT_EQ(batch_slots(1, 16, 1), 17U);
  EXPECT_EQ(batch_slots(4, 16, 8), 6U);
  EXPECT_EQ(batch_slots(4, 17, 8), 7U);
  EXPECT_EQ(batch_slots(2, 1, 64), 3U);
  EXPECT_EQ(batch_slots(3, 0, 4), 3U);
}

TEST(Sharding, TheLargestShareLeavesEachOtherRankOneMicroBatch) {
  EXPECT_EQ(largest_share(1, 4), 4);
  EXPECT_EQ(largest_share(3, 4), 10);
  EXPECT_EQ(largest_share(24, 1), 1);
}

}  // namespace
}  // namespace accelmgr::data
