#include "engine/faults/plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>

namespace accelmgr::faults {
namespace {

using base::FaultPhase;

Plan plan_of(const std::string& text, int rank = 0, std::uint32_t generation = 1) {
  return Plan({parse(text)}, rank, generation);
}

bool concerns(const std::string& text, int rank, std::uint32_t generation) {
  return !plan_of(text, rank, generation).empty();
}

/// Reaches `phase` in `step` `count` times. Returns which of these reaches, counted from 1, a fault strikes.
std::vector<int> struck(Plan& plan, FaultPhase phase, std::uint64_t step, int count) {
  std::vector<int> found;
  for (int i = 1; i <= count; ++i)
    if (!plan.reach(phase, step).empty()) found.push_back(i);
  return found;
}

using Struck = std::vector<int>;

TEST(FaultPlan, AnyRankIsNotTheManager) {
  EXPECT_TRUE(concerns("rank=any phase=data fault=kill", 0, 1));
  EXPECT_TRUE(concerns("rank=any phase=data fault=kill", 23, 1));
  EXPECT_FALSE(concerns("rank=any phase=data generation=any fault=kill", manager_rank, 0));
  EXPECT_TRUE(concerns("rank=manager phase=data fault=kill", manager_rank, 0));
  EXPECT_FALSE(concerns("rank=manager phase=data generation=any fault=kill", 0, 1));
}

TEST(FaultPlan, SparesReplacementsUnlessTheyAreMeant) {
  EXPECT_FALSE(concerns("rank=1 phase=data fault=kill", 1, 2));
  EXPECT_FALSE(concerns("rank=manager phase=data fault=kill", manager_rank, 1));
  EXPECT_TRUE(concerns("rank=1 phase=data generation=2 fault=kill", 1, 2));
  EXPECT_FALSE(concerns("rank=1 phase=data generation=2 fault=kill", 1, 1));
  EXPECT_TRUE(concerns("rank=1 phase=data generation=any fault=kill", 1, 1));
  EXPECT_TRUE(concerns("rank=1 phase=data generation=any fault=kill", 1, 9));
}

TEST(FaultPlan, CountsOccurrencesInEachStepAnew) {
  auto plan = plan_of("rank=0 phase=chunk occurrence=3 fault=kill");
  EXPECT_EQ(struck(plan, FaultPhase::chunk, 1, 2), Struck{});
  EXPECT_EQ(struck(plan, FaultPhase::chunk, 2, 5), Struck{3});
  EXPECT_EQ(struck(plan, FaultPhase::chunk, 3, 5), Struck{3});
}

TEST(FaultPlan, AnyPhaseCountsThemAll) {
  auto plan = plan_of("rank=0 step=1 phase=any occurrence=3 fault=kill");
  EXPECT_TRUE(plan.reach(FaultPhase::data, 1).empty());
  EXPECT_TRUE(plan.reach(FaultPhase::forward, 1).empty());
  EXPECT_FALSE(plan.reach(FaultPhase::backward, 1).empty());
}

constexpr int draws = 1000;

Struck drawn(const std::string& seed, int rank, std::uint32_t generation) {
  auto plan =
      plan_of("rank=any generation=any phase=any probability=0.3 fault=kill seed=" + seed, rank, generation);
  return struck(plan, FaultPhase::chunk, 1, draws);
}

TEST(RandomFaults, DependOnSeedRankAndGenerationAlone) {
  const auto once = drawn("7", 0, 1);
  EXPECT_EQ(drawn("7", 0, 1), once);
  EXPECT_NE(drawn("8", 0, 1), once);
  EXPECT_NE(drawn("7", 1, 1), once);
  EXPECT_NE(drawn("7", 0, 2), once);
}

TEST(RandomFaults, StrikeAsOftenAsTheirProbabilitySays) {
  for (const auto* seed : {"1", "2", "3"}) {
    const auto count = drawn(seed, 0, 1).size();
    EXPECT_GT(count, 240U) << "seed " << seed;  // The standard deviation is 14.5; the draws are fixed.
    EXPECT_LT(count, 360U) << "seed " << seed;
  }
}

TEST(RandomFaults, DrawOnlyWhereTheyMayStrike) {
  const std::string text = "rank=0 step=2 phase=vote probability=0.3 seed=7 fault=kill";
  auto undisturbed = plan_of(text);
  auto plan = plan_of(text);
  EXPECT_EQ(struck(plan, FaultPhase::vote, 1, draws), Struck{});
  EXPECT_EQ(struck(plan, FaultPhase::data, 2, draws), Struck{});
  EXPECT_EQ(struck(plan, FaultPhase::vote, 2, draws), struck(undisturbed, FaultPhase::vote, 2, draws));
}

}  // namespace
}  // namespace accelmgr::faults
