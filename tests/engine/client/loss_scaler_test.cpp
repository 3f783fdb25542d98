// Tests of LossScaler against the rule of torch.amp.GradScaler, which is written here once more.
#include "engine/client/loss_scaler.hpp"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include "base/power_of_two.hpp"

namespace accelmgr::client {
namespace {

RunnersConfig with(Autocast autocast, double initial = 65536, int growth_steps = 2000) {
  return {.autocast = autocast, .loss_scale = {.initial = initial, .growth_steps = growth_steps}};
}

constexpr session::LossScale none{};

TEST(LossScaler, ScalesNothingUnlessAutocastIsFp16) {
  constexpr session::LossScale earlier{1024, 7};
  for (const auto autocast : {Autocast::off, Autocast::bf16}) {
    const LossScaler scaler(with(autocast));
    for (const auto& committed : {none, earlier}) {
      EXPECT_EQ(scaler.first(committed), 1);
      EXPECT_FALSE(scaler.can_lower(1));
      EXPECT_EQ(scaler.after(committed, 1).scale, committed.scale) << "of a checkpoint, for a later run";
      EXPECT_EQ(scaler.after(committed, 1).good_steps, committed.good_steps);
    }
  }
}

TEST(LossScaler, StaysWithinItsBounds) {
  const LossScaler scaler(with(Autocast::fp16, 1, 1));
  EXPECT_FALSE(scaler.can_lower(LossScaler::least));
  EXPECT_TRUE(scaler.can_lower(2 * LossScaler::least));
  EXPECT_EQ(scaler.after({LossScaler::largest, 0}, LossScaler::largest).scale, LossScaler::largest);
  EXPECT_EQ(scaler.first({2 * LossScaler::largest, 0}), LossScaler::largest);
}

TEST(LossScaler, NeverGrowsWithoutGrowthSteps) {
  const LossScaler scaler(with(Autocast::fp16, 16, 0));
  session::LossScale scale{};
  for (int step = 0; step < 5000; ++step) scale = scaler.after(scale, scaler.first(scale));
  EXPECT_EQ(scale.scale, 16);
}

// GradScaler halves the scale at each overflow, leaves the batch out, and counts growth from 0 again.
RC_GTEST_PROP(LossScaler, FollowsGradScaler, ()) {
  const int growth_steps = *rc::gen::inRange(1, 6);
  const LossScaler scaler(with(Autocast::fp16, 65536, growth_steps));
  double reference = 65536;
  int tracker = 0;
  session::LossScale committed{};
  for (const int limit_exponent : *rc::gen::container<std::vector<int>>(rc::gen::inRange(-8, 20))) {
    const double limit = std::ldexp(1.0, limit_exponent);
    double scale = scaler.first(committed);
    RC_ASSERT(scale == reference);
    for (; scale > limit; scale /= 2) {
      RC_ASSERT(scaler.can_lower(scale));
      reference /= 2;
      tracker = 0;
    }
    if (++tracker == growth_steps) {
      reference *= 2;
      tracker = 0;
    }
    committed = scaler.after(committed, scale);
    RC_ASSERT(committed.scale == reference);
    RC_ASSERT(base::is_power_of_two(committed.scale));
  }
}

TEST(PowerOfTwo, IsOneNumberInEachBinade) {
  for (const double power : {0x1p-1074, 0x1p-10, 0.5, 1.0, 2.0, 65536.0, 0x1p1023})
    EXPECT_TRUE(base::is_power_of_two(power)) << power;
  for (const double other : {0.0, -2.0, 3.0, 0x1.8p10, 65537.0, HUGE_VAL, -HUGE_VAL, std::nan("")})
    EXPECT_FALSE(base::is_power_of_two(other)) << other;
}

TEST(LossScaler, IsHalvedWithinAStepAndNotInTheNext) {
  RunnersConfig runners;
  runners.autocast = Autocast::fp16;
  LossScaler scaler(runners);
  const session::LossScale committed{1024, 0};
  scaler.begin_step();
  EXPECT_EQ(scaler.scale(committed), 1024);
  scaler.lower();
  scaler.lower();
  EXPECT_EQ(scaler.scale(committed), 256);
  scaler.begin_step();
  EXPECT_EQ(scaler.scale(committed), 1024);
}

}  // namespace
}  // namespace accelmgr::client
