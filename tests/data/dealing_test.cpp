#include "data/dealing.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>

namespace accelmgr::data {
namespace {

TEST(Dealing, ElementIGoesToRankNumberIModNOfTheTeam) {
  EXPECT_EQ(rank_of(0, 0b111), 0);
  EXPECT_EQ(rank_of(2, 0b111), 2);
  EXPECT_EQ(rank_of(0, 0b101000), 3);
  EXPECT_EQ(rank_of(1, 0b101000), 5);
  EXPECT_EQ(place_of(3, 0b111, 4).rank, 0);
  EXPECT_EQ(place_of(3, 0b101000, 4).rank, 5);
  EXPECT_EQ(place_of(7, 0b100, 4).rank, 2);
}

TEST(Dealing, ARanksElementsFillItsBatchesOneAfterTheOther) {
  EXPECT_EQ(place_of(0, 0b101, 2), (Place{0, 0, 0}));
  EXPECT_EQ(place_of(2, 0b101, 2), (Place{0, 0, 1}));
  EXPECT_EQ(place_of(3, 0b101, 2), (Place{2, 0, 1}));
  EXPECT_EQ(place_of(4, 0b101, 2), (Place{0, 1, 0}));
  EXPECT_EQ(round_elements(0b101, 2), 4U);
}

TEST(Dealing, ElementNumbersBeyond32BitsKeepTheirPlace) {
  EXPECT_EQ(place_of(std::uint64_t{1} << 40, 0xffffff, 1).rank,
            static_cast<int>((std::uint64_t{1} << 40) % 24));
  EXPECT_EQ(place_of(UINT64_MAX, 0b11, 4), (Place{1, UINT64_MAX / 8, 3}));
}

TEST(Dealing, WhatIsMissingAndWhereItEndsFollowFromTheRows) {
  for (std::uint64_t elements = 0; elements < 20; ++elements) {
    std::array<std::uint64_t, 3> rows{};
    for (std::uint64_t i = 0; i < elements; ++i) ++rows[i % 3];
    EXPECT_EQ(first_missing(rows), elements);
    EXPECT_EQ(end_of(rows), elements);
  }
}

TEST(Dealing, ABatchThatWasNotPublishedIsMissingWhereItBegins) {
  EXPECT_EQ(first_missing(std::array<std::uint64_t, 3>{8, 4, 7}), 13U);
  EXPECT_EQ(end_of(std::array<std::uint64_t, 3>{8, 4, 7}), 22U);
  EXPECT_EQ(first_missing(std::array<std::uint64_t, 1>{4}), 4U);
}

TEST(Dealing, ARingHoldsTheStepUnderWayAndPrefetchRoundedUpToBatches) {
  EXPECT_EQ(batch_slots(1, 16, 1), 17U);
  EXPECT_EQ(batch_slots(4, 16, 8), 6U);
  EXPECT_EQ(batch_slots(4, 17, 8), 7U);
  EXPECT_EQ(batch_slots(2, 1, 64), 3U);
}

TEST(Dealing, WithoutPrefetchARingHoldsTheStepUnderWay) { EXPECT_EQ(batch_slots(3, 0, 4), 3U); }

}  // namespace
}  // namespace accelmgr::data
