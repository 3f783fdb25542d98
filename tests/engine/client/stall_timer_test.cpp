#include "engine/client/stall_timer.hpp"
#include "base/timing.hpp"

#include <gtest/gtest.h>

namespace accelmgr::client {
namespace {

constexpr std::int64_t ms = 1'000'000, begin_ns = 1'000 * ms;

TEST(StallTimer, LastsFromTheLastMove) {
  StallTimer stall_timer;
  EXPECT_EQ(stall_timer.look(5, begin_ns), 0);
  EXPECT_EQ(stall_timer.look(5, begin_ns + 20 * ms), 20 * ms);
  EXPECT_EQ(stall_timer.look(5, begin_ns + 60 * ms), 60 * ms);
  EXPECT_EQ(stall_timer.look(6, begin_ns + 80 * ms), 0);
  EXPECT_EQ(stall_timer.look(6, begin_ns + 90 * ms), 10 * ms);
}

TEST(StallTimer, DoesNotCountTheTimeForWhichTheHostItselfWasStopped) {
  StallTimer stall_timer;
  stall_timer.look(5, begin_ns);
  EXPECT_EQ(stall_timer.look(5, begin_ns + 3'600'000 * ms), timing::stall_look_ns);
}

}  // namespace
}  // namespace accelmgr::client
