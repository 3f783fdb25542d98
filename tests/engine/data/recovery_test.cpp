// Checks that the next loader loses and doubles no element after the one before was killed at any instant, or
// after a run resumed in a new session. A kill is simulated: the test writes the state that it would leave.
#include <gtest/gtest.h>

#include <algorithm>

#include "engine/data/training.hpp"
#include "message_of.hpp"
#include "refusal.hpp"

namespace accelmgr::data {
namespace {

/// A copy of what a loader has written into a session. Two copies show what a call changed.
struct Written {
  struct Ring {
    std::uint64_t published, filling, end;
  };
  explicit Written(const Training& t) : follows(t.sharding().follows.load()) {
    for (int rank = 0; rank < t.session().ranks(); ++rank) {
      const auto& queue = t.session().queue(rank);
      rings.push_back({queue.published.load(), queue.filling.load(), queue.end.load()});
    }
  }
  std::uint64_t follows;
  std::vector<Ring> rings;
};

session::Queue& queue_of(const Training& t, std::size_t rank) {
  return t.session().queue(static_cast<int>(rank));
}

/// As if killed between the two stores that publish a batch. The slot is overwritten, because nothing ensures
/// that the batch's elements are in it.
void tear_publication(const Training& t, std::size_t rank, const Written::Ring& was) {
  auto& queue = queue_of(t, rank);
  queue.filling.store(0);
  queue.published.store(was.published);
  queue.end.store(was.end);
  const session::BatchQueueWriter ring(t.session(), static_cast<int>(rank));
  std::memset(const_cast<std::byte*>(ring.slot(was.published)), 0xee, t.session().header().slot_bytes);
}

/// As if killed while the queues are rewound: only the first one has been.
void tear_sharding(const Training& t, const Written& before) {
  t.sharding().assigned_to.store(0);
  t.sharding().first_element = 12345;
  t.sharding().shares = session::even_shares(777);
  t.sharding().follows.store(before.follows);
  for (std::size_t rank = 1; rank < before.rings.size(); ++rank) {
    queue_of(t, rank).published.store(before.rings[rank].published);
    queue_of(t, rank).filling.store(before.rings[rank].filling);
  }
}

/// As if killed while the queues get their end: the first one has it, the second is about to get it.
void tear_end(const Training& t, const Written& before, const Written& after) {
  int told = 0;
  for (std::size_t rank = 0; rank < after.rings.size(); ++rank) {
    const auto& was = before.rings[rank];
    const auto& is = after.rings[rank];
    if (is.end == was.end || ++told == 1) continue;
    if (told == 2 && is.published != was.published) {
      tear_publication(t, rank, was);
    } else {
      queue_of(t, rank).published.store(was.published);
      queue_of(t, rank).filling.store(was.filling);
      queue_of(t, rank).end.store(was.end);
    }
  }
}

/// As if killed before the element, or the batch that it completed, was counted.
void tear_element(const Training& t, const Written& before, const Written& after) {
  for (std::size_t rank = 0; rank < after.rings.size(); ++rank) {
    const auto& was = before.rings[rank];
    if (after.rings[rank].published != was.published) {
      tear_publication(t, rank, was);
    } else if (after.rings[rank].filling != was.filling) {
      const session::BatchQueueWriter queue(t.session(), static_cast<int>(rank));
      auto* slot = const_cast<std::byte*>(queue.slot(was.published));
      std::memset(slot + was.filling * sizeof(std::int64_t), 0xee, sizeof(std::int64_t));
      queue_of(t, rank).filling.store(was.filling);
    }
  }
}

/// Puts the session into a state that a loader leaves when it is killed inside its last call. `before` is the
/// state before that call.
void tear(const Training& t, const Written& before) {
  const Written after(t);
  const bool end =
      !std::ranges::equal(after.rings, before.rings, {}, &Written::Ring::end, &Written::Ring::end);
  if (after.follows != before.follows) {
    tear_sharding(t, before);
  } else if (end) {
    tear_end(t, before, after);
  } else {
    tear_element(t, before, after);
  }
}

/// When the loader of a training is killed: before its calls number `at`, `at` + `every`, ... If `torn`, the
/// session is left as by a kill inside the previous call.
struct Kills {
  int at;
  int every;  ///< 0: once.
  bool torn;
  bool reads_again = false;  ///< Whether the next loader reads again what was read ahead.
};

/// Runs a training with steps, aborts and four teams, and kills its loader as `kills` says. Returns the
/// number of calls of the loader.
int train(Shape shape, NumbersPlan plan, const std::vector<Team>& teams, Kills kills) {
  SCOPED_TRACE(testing::Message() << plan.count << " elements, states " << plan.states << ", drop_last "
                                  << shape.drop_last << ", killed before call " << kills.at << " and every "
                                  << kills.every << ", torn " << kills.torn);
  Training t(shape, std::move(plan), teams[0]);
  int calls = 0;
  Written before(t);
  const auto call = [&] {
    const bool due =
        calls == kills.at || (kills.every > 0 && calls > kills.at && (calls - kills.at) % kills.every == 0);
    if (due) {
      if (kills.torn && calls > 0) tear(t, before);
      t.kill(kills.reads_again);
    }
    t.loader();
    before = Written(t);
    ++calls;
    return t.loader().do_work();
  };
  const auto work = [&](int limit) {
    while (limit-- > 0 && call()) {
    }
  };
  const auto assign_to = [&](const Team& team) {
    t.ask_for(team);
    while (!t.loader_follows()) call();
  };
  work(7);
  work(1000);
  EXPECT_TRUE(t.step());
  work(5);
  assign_to(teams[1]);
  work(2);
  assign_to(teams[2]);
  t.abort();
  work(1000);
  EXPECT_TRUE(t.step());
  work(3);
  t.abort();
  assign_to(teams[3]);
  do {
    work(1000);
  } while (t.step());
  while (!t.loader().finished()) call();
  t.finish();
  return calls;
}

class Recovery : public testing::TestWithParam<std::tuple<bool, bool, bool>> {
 protected:
  NumbersPlan plan(std::int64_t count) const { return {.count = count, .states = std::get<0>(GetParam())}; }
  Shape shape(int batch_size) const {
    const bool keeps_last_step = batch_size == 2;
    return {.ranks = 3,
            .slots = keeps_last_step ? 6u : 3u,
            .batch_size = batch_size,
            .drop_last = std::get<1>(GetParam()),
            .keeps_last_step = keeps_last_step};
  }
  static std::vector<Team> teams() {
    if (std::get<2>(GetParam())) return {{0b111, {1, 2, 1}}, {0b111, {2, 1, 1}}, {0b110, {0, 1, 3}}, 0b111};
    return {0b111, 0b101, 0b110, 0b111};
  }
  void kill_everywhere(int every, bool torn, bool reads_again = false) {
    for (const int batch_size : {1, 2, 3})
      for (const std::int64_t count : {36, 41})
        for (const std::int64_t epoch : {0, 17}) {
          auto plan = this->plan(count);
          plan.epoch = epoch;
          const int calls = train(shape(batch_size), plan, teams(), {.at = -1, .every = 0, .torn = false});
          for (int at = 0; at <= calls; ++at)
            train(shape(batch_size), plan, teams(), {at, every, torn, reads_again});
        }
  }
};
INSTANTIATE_TEST_SUITE_P(States, Recovery,
                         testing::Combine(testing::Bool(), testing::Bool(), testing::Bool()),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param) ? "WithStates" : "WithoutStates") +
                                  (std::get<1>(info.param) ? "DropLast" : "ShortLast") +
                                  (std::get<2>(info.param) ? "Uneven" : "Even");
                         });

TEST_P(Recovery, BetweenAnyTwoCallsLosesAndDoublesNothing) { kill_everywhere(0, false); }
TEST_P(Recovery, InsideAnyCallLosesAndDoublesNothing) { kill_everywhere(0, true); }
TEST_P(Recovery, AgainAndAgainLosesAndDoublesNothing) { kill_everywhere(50, true); }

TEST_P(Recovery, ReadingAgainLosesAndDoublesNothing) { kill_everywhere(0, true, true); }

TEST_P(Recovery, ResumesFromACheckpointOfAnyStepInANewSession) {
  for (const int batch_size : {1, 2})
    for (int steps = 0; steps < 7; ++steps)
      for (int ahead = 0; ahead < 10; ++ahead) {
        Training t(shape(batch_size), plan(64), teams()[1]);
        for (int i = 0; i < steps; ++i) {
          t.work();
          ASSERT_TRUE(t.step());
        }
        t.work(ahead);
        Training resumed(shape(batch_size), plan(64), teams()[0]);
        resumed.counters() = t.counters();
        // The queues of a new session may begin with any number.
        std::fill_n(resumed.counters().batches, session::max_ranks, ahead);
        resumed.sharding().source[0] = t.sharding().source[t.sharding().source_index.load()];
        resumed.finish();
      }
}

TEST(RecoveryReading, GoesOnInTheSlotsAsTheyAreAndReadsOnFromTheState) {
  const NumbersPlan plan{.count = 100, .states = true};
  Training t({.ranks = 2, .slots = 4, .batch_size = 3}, plan);
  t.work();
  ASSERT_TRUE(t.step());
  t.work(2);
  EXPECT_EQ(t.sharding().source[t.sharding().source_index.load()].element, 6u);
  const auto assigned = t.loader().assigned();
  EXPECT_EQ(assigned, 26u);
  t.kill();
  *plan.reads = 0;
  EXPECT_EQ(t.loader().assigned(), assigned);
  EXPECT_EQ(*plan.reads, 0u) << "a slow source does not hold up who makes the loader";
  t.work(20);
  EXPECT_EQ(t.loader().assigned(), assigned);
  EXPECT_EQ(*plan.reads, 20u) << "6 to 25 were assigned";
  t.work(1);
  EXPECT_EQ(t.loader().assigned(), assigned + 1);
  t.finish();
}

TEST(RecoveryReading, ReadsAgainWhatNoStepHasConsumedIfTheDataMayHaveChanged) {
  const NumbersPlan plan{.count = 100, .states = true};
  Training t({.ranks = 2, .slots = 4, .batch_size = 3}, plan);
  t.work();
  ASSERT_TRUE(t.step());
  t.work();
  *plan.reads = 0;
  t.kill(/*reads_again=*/true);
  EXPECT_EQ(t.loader().assigned(), 6u);
  EXPECT_EQ(t.state(0, 1), session::BatchQueue::State::empty);
  t.work(1);
  EXPECT_EQ(*plan.reads, 1u) << "its state is that of the data cursor";
  t.finish();
}

TEST(RecoveryReading, ASourceThatEndsSoonerThanBeforeIsAnError) {
  const auto error_of = [](const Training& t) { return session::BatchQueue(t.session(), 0).error(); };
  Training before_the_cursor({.ranks = 2, .slots = 2}, {.count = 30});
  before_the_cursor.counters().elements = 31;
  before_the_cursor.work();
  EXPECT_EQ(before_the_cursor.state(0, 0), session::BatchQueue::State::failed);
  EXPECT_EQ(error_of(before_the_cursor),
            "the data source ended after 30 elements, but the first time it gave 31: it must give the same "
            "elements every time");
  Training before_the_queues({.ranks = 2, .slots = 2, .batch_size = 3}, {.count = 100});
  before_the_queues.work(10);
  before_the_queues.kill();
  before_the_queues.plan().count = 9;
  before_the_queues.work();
  test::expect_contains(error_of(before_the_queues), {"ended after 9 elements", "the first time it gave 10"});
}

TEST(RecoveryReading, ABatchThatIsMissingAndCannotBeReadAgainIsAnError) {
  Training t({.ranks = 2, .slots = 2, .batch_size = 2}, {.count = 100});
  t.work(3);
  t.session().queue(0).published.store(0);
  t.kill();
  t.plan().count = 0;
  t.work();
  EXPECT_EQ(t.state(0, 0), session::BatchQueue::State::failed);
  EXPECT_NE(session::BatchQueue(t.session(), 0).error().find("ended after 0 elements"), std::string::npos);
}

TEST(RecoveryReading, ASourceThatFailedMayGoOn) {
  for (const bool drop_last : {true, false}) {
    Training t({.ranks = 2, .slots = 4, .batch_size = 2, .drop_last = drop_last},
               {.count = 20, .fails_at = 7});
    t.work();
    ASSERT_TRUE(t.step());
    ASSERT_EQ(t.state(1, 2), session::BatchQueue::State::failed);
    t.kill();
    t.plan().fails_at = -1;
    t.loader();
    EXPECT_EQ(t.state(1, 2), session::BatchQueue::State::empty);
    t.finish();
  }
}

TEST(RecoveryReading, AfterAShortStepOfUnequalSharesTheNextStepIsAWholeOne) {
  Training t({.ranks = 2, .slots = 4, .drop_last = false}, {.count = 6}, {0b11, {1, 3}});
  t.work();
  ASSERT_TRUE(t.step());
  t.work();
  ASSERT_TRUE(t.step());
  ASSERT_EQ(t.cursor(), 6u) << "the second step had two elements of four";
  t.kill();
  t.plan().count = 14;
  EXPECT_EQ(t.loader().assigned(), 6u);
  t.work();
  EXPECT_TRUE(t.step());
  EXPECT_EQ(t.cursor(), 10u);
  t.finish();
}

TEST(RecoveryReading, AStateBeyondTheDataCursorIsRefused) {
  Training t({}, {.count = 30, .states = true});
  auto& left = t.sharding().source[0];
  left.element = 5;
  left.bytes = 1;
  left.state[0] = '5';
  test::expect_contains(test::message_of<SessionError>([&] { t.loader(); }),
                        {"of element 5) is damaged: its element lies after the data cursor, 0"});
}

}  // namespace
}  // namespace accelmgr::data
