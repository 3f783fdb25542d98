#include "data/dealing.hpp"

#include <gtest/gtest.h>

#include <cstdint>

namespace accelmgr::data {
namespace {

TEST(Dealing, ElementIGoesToDeviceIModN) {
  EXPECT_EQ(device_of(0, 3), 0);
  EXPECT_EQ(device_of(1, 3), 1);
  EXPECT_EQ(device_of(2, 3), 2);
  EXPECT_EQ(device_of(3, 3), 0);
  EXPECT_EQ(device_of(7, 1), 0);
}

TEST(Dealing, ElementNumbersBeyond32BitsKeepTheirDevice) {
  EXPECT_EQ(device_of(std::uint64_t{1} << 40, 24), static_cast<int>((std::uint64_t{1} << 40) % 24));
  EXPECT_EQ(device_of(UINT64_MAX, 2), 1);
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
