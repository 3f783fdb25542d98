// Tests of fault points without a handler: this program does not link accelmgr_faults, which installs one.
#include "base/fault_point.hpp"

#include <gtest/gtest.h>

#include "message_of.hpp"

namespace accelmgr::base {
namespace {

TEST(FaultPoint, DoesNothingWithoutHandler) {
  arm_faults({}, 0, 1);
  EXPECT_EQ(fault_point(FaultPhase::forward), FaultEffect::none);
}

TEST(FaultPoint, FaultsThatNobodyWouldInjectAreRefused) {
  EXPECT_EQ(test::message_of<ConfigError>([&] { arm_faults({"rank=0 phase=forward fault=kill"}, 0, 1); }),
            "faults is set, but this program cannot inject any; it must link accelmgr_faults");
}

}  // namespace
}  // namespace accelmgr::base
