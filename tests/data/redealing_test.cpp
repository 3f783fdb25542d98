// What is not consumed is dealt to another team: each element once, in order, from wherever the loader
// stands.
#include <gtest/gtest.h>

#include "data/training.hpp"

namespace accelmgr::data {
namespace {

using session::BatchQueue;
using session::RankMask;

struct Teams {
  const char* name;
  std::vector<RankMask> masks;  ///< Of three ranks, one after the other.
  friend void PrintTo(const Teams& teams, std::ostream* out) { *out << teams.name; }
};

class Redealing : public testing::TestWithParam<Teams> {
 protected:
  /// Trains `steps` steps, deals `ahead` elements more, deals to the next team, deals `between` more, and so
  /// on; then to the end.
  void run(Shape shape, const NumbersPlan& plan, int steps, int ahead, int between) {
    const auto& teams = GetParam().masks;
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
      t.deal_to(teams[i]);
      EXPECT_EQ(t.loader().dealt(), t.cursor());
      if (i + 1 < teams.size()) t.work(between);
    }
    t.finish();
  }
};

TEST_P(Redealing, AtEveryCursorAndFillLevelLosesAndDoublesNothing) {
  for (const int batch_size : {1, 2, 3})
    for (const bool drop_last : {true, false})
      for (int steps = 0; steps < 4; ++steps)
        for (int ahead = 0; ahead <= 3 * 3 * batch_size; ++ahead)
          run({.ranks = 3, .slots = 3, .batch_size = batch_size, .drop_last = drop_last},
              {.count = 50, .states = ahead % 2 == 0}, steps, ahead, ahead / 2);
}

TEST_P(Redealing, BeforeTheLastOnesAreOutLosesAndDoublesNothing) {
  for (const bool drop_last : {true, false})
    for (int ahead = 0; ahead <= 18; ++ahead)
      for (int between = 0; between <= 14; ++between)
        run({.ranks = 3, .slots = 3, .batch_size = 2, .drop_last = drop_last}, {.count = 60}, 1, ahead,
            between);
}

TEST_P(Redealing, AtTheEndOfTheDataDealsWhatWasLeftOutAndEndsAgain) {
  for (const bool drop_last : {true, false})
    for (std::int64_t count = 0; count <= 26; ++count)
      for (int steps = 0; steps < 3; ++steps)
        run({.ranks = 3, .slots = 4, .batch_size = 2, .drop_last = drop_last}, {.count = count}, steps, 100,
            3);
}

TEST_P(Redealing, AfterAFailureDealsWhatCameBeforeItAndFailsAgain) {
  for (std::int64_t fails_at = 0; fails_at <= 18; ++fails_at) {
    SCOPED_TRACE(testing::Message() << "fails at " << fails_at);
    const auto& teams = GetParam().masks;
    Training t({.ranks = 3, .slots = 3, .batch_size = 2}, {.count = 100, .fails_at = fails_at}, teams[0]);
    t.work();
    t.step();
    t.work();
    for (std::size_t i = 1; i < teams.size(); ++i) {
      t.deal_to(teams[i]);
      t.work();
    }
    while (t.step()) t.work();
    const auto left = static_cast<std::uint64_t>(fails_at) - t.cursor();
    EXPECT_LT(left, round_elements(teams.back(), 2));
    for (int rank = 0; rank < 3; ++rank) {
      if ((teams.back() >> rank & 1) == 0) continue;
      EXPECT_EQ(t.state(rank, t.counters().batches[rank] + 1), BatchQueue::State::failed);
      EXPECT_EQ(BatchQueue(t.session(), rank).error(), "number " + std::to_string(fails_at) + " is missing");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Teams, Redealing,
                         testing::Values(Teams{"ShrinkTo2", {0b111, 0b101}}, Teams{"GrowTo3", {0b110, 0b111}},
                                         Teams{"OneInBetween", {0b111, 0b010, 0b111}},
                                         Teams{"Another", {0b001, 0b100, 0b001}}),
                         [](const auto& teams) { return teams.param.name; });

TEST(RedealingOnce, KeepsOrderPlacesAndElements) {
  Training t({.ranks = 3, .slots = 4, .batch_size = 2}, {.count = 11});
  t.work();
  ASSERT_TRUE(t.step());
  t.deal_to(0b101);
  t.work();
  EXPECT_EQ(t.batch(0, 1), (std::vector<std::int64_t>{6, 8}));
  EXPECT_EQ(t.batch(2, 1), (std::vector<std::int64_t>{7, 9}));
  EXPECT_EQ(t.loader().dropped(), 1u);
  EXPECT_EQ(t.dealing().first_element, 6u);
  EXPECT_EQ(t.dealing().first_batch[2], 1u);
}

TEST(RedealingOnce, ReadsNothingTwice) {
  const NumbersPlan plan{.count = 30};
  Training t({.ranks = 3, .slots = 3, .batch_size = 2}, plan);
  t.work(13);
  t.deal_to(0b001);
  t.work(3);
  t.deal_to(0b011);
  t.finish();
  EXPECT_EQ(*plan.reads, 30u);
}

TEST(RedealingOnce, TheSameTeamIsNotDealtToAgain) {
  Training t({.ranks = 2, .slots = 3}, {.count = 100});
  t.work();
  t.ask_for(0b11);
  EXPECT_FALSE(t.loader().do_work());
  EXPECT_EQ(t.loader().dealt(), 6u);
}

}  // namespace
}  // namespace accelmgr::data
