// Tests of the fault handler as production code uses it: first armed, then reached. What ends or stops a
// process is in the outcome table (engine/system/faults).
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/fault_point.hpp"
#include "base/log.hpp"

namespace accelmgr::faults {
namespace {

using base::FaultEffect;
using base::FaultPhase;

/// Arms this process as the first runner of rank 0.
void arm(const std::vector<std::string>& faults) { base::arm_faults(faults, 0, 1); }

class FaultInjection : public testing::Test {
 protected:
  ~FaultInjection() override {
    arm({});
    base::set_log_step(0);
  }
};

TEST_F(FaultInjection, ForgetsThePlanOfTheParent) {
  arm({"rank=0 phase=forward fault=nan"});
  arm({});
  EXPECT_EQ(base::fault_point(FaultPhase::forward), FaultEffect::none);
}

TEST_F(FaultInjection, RefusesAFaultItCannotReadInEveryProcess) {
  EXPECT_THROW(arm({"rank=1 phase=forward"}), ConfigError);
}

TEST_F(FaultInjection, OfSlowLastsAtLeastThatLong) {
  arm({"rank=0 phase=forward fault=slow:20"});
  const auto begin = base::now_ns();
  EXPECT_EQ(base::fault_point(FaultPhase::forward), FaultEffect::none);
  EXPECT_GE(base::now_ns() - begin, 20'000'000);
}

TEST_F(FaultInjection, ActsOnAllFaultsOfAPlace) {
  arm({"rank=0 phase=forward fault=nan", "rank=0 phase=forward fault=slow:1"});
  EXPECT_EQ(base::fault_point(FaultPhase::forward), FaultEffect::nan);
}

TEST_F(FaultInjection, CountsTheReachesOfAllThreads) {
  constexpr int threads = 4, reaches = 1000;
  arm({"rank=0 phase=forward occurrence=" + std::to_string(threads * reaches) + " fault=nan"});
  std::atomic<int> struck{0};
  std::vector<std::jthread> all;
  for (int i = 0; i < threads; ++i)
    all.emplace_back([&] {
      for (int j = 0; j < reaches; ++j)
        if (base::fault_point(FaultPhase::forward) == FaultEffect::nan) ++struck;
    });
  all.clear();
  EXPECT_EQ(struck, 1);
}

}  // namespace
}  // namespace accelmgr::faults
