// Checks that the elements that are not consumed go to another team, or with other shares to the same: each
// once, in order, wherever the loader stands.
#include <gtest/gtest.h>

#include <random>

#include "engine/data/training.hpp"

namespace accelmgr::data {
namespace {

using session::BatchQueue;

struct Teams {
  const char* name;
  std::vector<Team> of;  ///< The teams of a training of three ranks, in their order.
  friend void PrintTo(const Teams& teams, std::ostream* out) { *out << teams.name; }
};

class Resharding : public testing::TestWithParam<Teams> {
 protected:
  /// Trains `steps` steps and lets the loader work `ahead` times. Then assigns to the next team and lets the
  /// loader work `between` times, and so on for all teams. Trains the last team to the end of the data.
  void run(Shape shape, const NumbersPlan& plan, int steps, int ahead, int between) {
    const auto& teams = GetParam().of;
    SCOPED_TRACE(testing::Message() << plan.count << " elements, batch size " << shape.batch_size
                                    << ", drop_last " << shape.drop_last << ", steps " << steps << ", ahead "
                                    << ahead << ", between " << between);
    Training t(shape, plan, teams[0]);
    for (int i = 0; i < steps; ++i) {
      t.work();
      t.step();
    }
    t.work(ahead);
    for (std::size_t i = 1; i < teams.size(); ++i) {
      t.assign_to(teams[i]);
      EXPECT_EQ(t.loader().assigned(), t.cursor());
      if (i + 1 < teams.size()) t.work(between);
    }
    t.finish();
  }
};

TEST_P(Resharding, AtEveryCursorAndFillLevelLosesAndDoublesNothing) {
  for (const int batch_size : {1, 2, 3})
    for (const bool drop_last : {true, false})
      for (int steps = 0; steps < 4; ++steps)
        for (int ahead = 0; ahead <= 3 * 3 * batch_size; ++ahead)
          run({.ranks = 3, .slots = 3, .batch_size = batch_size, .drop_last = drop_last},
              {.count = 50, .states = ahead % 2 == 0}, steps, ahead, ahead / 2);
}

TEST_P(Resharding, AtTheEndOfTheDataAssignsWhatWasLeftOutAndEndsAgain) {
  for (const bool drop_last : {true, false})
    for (std::int64_t count = 0; count <= 26; ++count)
      for (int steps = 0; steps < 3; ++steps)
        run({.ranks = 3, .slots = 4, .batch_size = 2, .drop_last = drop_last}, {.count = count}, steps, 100,
            3);
}

TEST_P(Resharding, EpochsEndWhereTheyDidWhateverTheTeam) {
  for (const bool drop_last : {true, false})
    for (const std::int64_t epoch : {14, 19})
      for (int steps = 0; steps < 4; ++steps)
        for (int ahead = 0; ahead <= 20; ++ahead)
          run({.ranks = 3, .slots = 3, .batch_size = 2, .drop_last = drop_last},
              {.count = 3 * epoch, .epoch = epoch, .states = ahead % 2 == 0}, steps, ahead, ahead / 2);
}

TEST_P(Resharding, AfterAFailureAssignsWhatCameBeforeItAndFailsAgain) {
  for (std::int64_t fails_at = 0; fails_at <= 18; ++fails_at) {
    SCOPED_TRACE(testing::Message() << "fails at " << fails_at);
    const auto& teams = GetParam().of;
    Training t({.ranks = 3, .slots = 3, .batch_size = 2}, {.count = 100, .fails_at = fails_at}, teams[0]);
    t.work();
    t.step();
    t.work();
    for (std::size_t i = 1; i < teams.size(); ++i) {
      t.assign_to(teams[i]);
      t.work();
    }
    while (t.step()) t.work();
    const auto left = static_cast<std::uint64_t>(fails_at) - t.cursor();
    EXPECT_LT(left, t.step_elements());
    for (int rank = 0; rank < 3; ++rank) {
      if ((teams.back().mask >> rank & 1) == 0) continue;
      const auto next_step = t.counters().batches[rank] + t.sharding().shares.of[rank];
      EXPECT_EQ(t.state(rank, next_step), BatchQueue::State::failed);
      EXPECT_EQ(BatchQueue(t.session(), rank).error(), "number " + std::to_string(fails_at) + " is missing");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Teams, Resharding,
    testing::Values(Teams{"ShrinkTo2", {0b111, 0b101}}, Teams{"GrowTo3", {0b110, 0b111}},
                    Teams{"OneInBetween", {0b111, 0b010, 0b111}}, Teams{"Another", {0b001, 0b100, 0b001}},
                    Teams{"OtherShares", {0b111, {0b111, {1, 3, 2}}, {0b111, {2, 1, 1}}}},
                    Teams{"SharesAndTeams", {{0b111, {3, 1, 1}}, {0b101, {1, 0, 3}}, 0b111}}),
    [](const auto& teams) { return teams.param.name; });

TEST(ReshardingOnce, ReadsNothingTwice) {
  const NumbersPlan plan{.count = 30};
  Training t({.ranks = 3, .slots = 3, .batch_size = 2}, plan);
  t.work(13);
  t.assign_to(0b001);
  t.work(3);
  t.assign_to(0b011);
  t.finish();
  EXPECT_EQ(*plan.reads, 30u);
}

/// A team of at least one rank, with shares of one to four.
Team random_team(std::mt19937& random, int ranks) {
  Team team(1 + static_cast<session::RankMask>(random()) % session::all_ranks(ranks));
  for (int rank = 0; rank < ranks; ++rank)
    team.shares.push_back(1 + static_cast<std::uint32_t>(random() % 4));
  return team;
}

TEST(ReshardingAtRandom, StepsAbortsKillsTeamsAndSharesInAnyOrderTrainEveryElementOnce) {
  for (unsigned seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const auto any = [&](int end) { return static_cast<int>(random() % static_cast<unsigned>(end)); };
    const int ranks = 1 + any(4);
    const bool keeps = seed % 2 == 0;
    Training t({.ranks = ranks,
                .slots = keeps ? 10u : 6u,
                .batch_size = 1 + any(3),
                .drop_last = any(2) == 0,
                .prefetch = any(12),
                .keeps_last_step = keeps},
               {.count = 100 + any(40), .epoch = any(2) * (48 + any(50)), .states = any(2) == 0},
               random_team(random, ranks));
    t.loader();
    for (int i = 0; i < 60; ++i) {
      switch (any(6)) {
        case 0:
          t.assign_to(random_team(random, ranks));
          break;
        case 1:
          t.kill();
          t.loader();
          break;
        case 2:
          t.abort();
          break;
        case 3:
          t.work();
          t.step();
          break;
        default:
          t.work(any(20));
          t.step();
      }
    }
    t.finish();
  }
}

TEST(ReshardingOnce, TheSameSharesAreNotAssignedAgainAndOthersAre) {
  Training t({.ranks = 2, .slots = 3}, {.count = 100}, {0b11, {1, 2}});
  t.work();
  const auto assigned = t.loader().assigned();
  t.ask_for({0b11, {1, 2}});
  EXPECT_FALSE(t.loader().do_work());
  EXPECT_TRUE(t.loader_follows());
  EXPECT_EQ(t.loader().assigned(), assigned);
  t.ask_for({0b11, {2, 1}});
  EXPECT_TRUE(t.loader().do_work());
  EXPECT_EQ(t.loader().assigned(), 0u);
  t.work();
  EXPECT_EQ(t.batch(0, 1), (std::vector<std::int64_t>{2}));
}

}  // namespace
}  // namespace accelmgr::data
