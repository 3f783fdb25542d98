// A loader that is killed at any instant, or whose session ends: the next one loses and doubles no element.
#include <gtest/gtest.h>

#include <algorithm>
#include <ranges>

#include "data/training.hpp"
#include "message_of.hpp"

namespace accelmgr::data {
namespace {

using session::RankMask;

/// What a loader writes into a session, to see what its last call changed.
struct Written {
  struct Ring {
    std::uint64_t published, filling, end;
  };
  explicit Written(const Training& t) : dealt_to(t.dealing().dealt_to.load()) {
    for (int rank = 0; rank < t.session().ranks(); ++rank) {
      const auto& queue = t.session().queue(rank);
      rings.push_back({queue.published.load(), queue.filling.load(), queue.end.load()});
    }
  }
  RankMask dealt_to;
  std::vector<Ring> rings;
};

session::Queue& queue_of(const Training& t, std::size_t rank) {
  return t.session().queue(static_cast<int>(rank));
}

/// Killed between the two stores that publish a batch. That its elements are in the slot is luck.
void tear_publication(const Training& t, std::size_t rank, const Written::Ring& was) {
  auto& queue = queue_of(t, rank);
  queue.filling.store(0);
  queue.published.store(was.published);
  queue.end.store(was.end);
  const session::BatchQueue ring(t.session(), static_cast<int>(rank));
  std::memset(const_cast<std::byte*>(ring.slot(was.published)), 0xee, t.session().header().slot_bytes);
}

/// Killed while the queues are rewound: the first one is.
void tear_dealing(const Training& t, const Written& before) {
  t.dealing().dealt_to.store(0);
  t.dealing().first_element = 12345;
  for (std::size_t rank = 1; rank < before.rings.size(); ++rank) {
    queue_of(t, rank).published.store(before.rings[rank].published);
    queue_of(t, rank).filling.store(before.rings[rank].filling);
  }
}

/// Killed while the queues are told the end: the first one knows it, the next is about to.
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

/// Killed before the element, or the batch that it completed, was counted.
void tear_element(const Training& t, const Written& before, const Written& after) {
  for (std::size_t rank = 0; rank < after.rings.size(); ++rank) {
    const auto& was = before.rings[rank];
    if (after.rings[rank].published != was.published) {
      tear_publication(t, rank, was);
    } else if (after.rings[rank].filling != was.filling) {
      const session::BatchQueue queue(t.session(), static_cast<int>(rank));
      auto* slot = const_cast<std::byte*>(queue.slot(was.published));
      std::memset(slot + was.filling * sizeof(std::int64_t), 0xee, sizeof(std::int64_t));
      queue_of(t, rank).filling.store(was.filling);
    }
  }
}

/// The session as a loader leaves it that is killed inside the call before which it was `before`.
void tear(const Training& t, const Written& before) {
  const Written after(t);
  const bool end = std::ranges::any_of(std::views::iota(std::size_t{0}, after.rings.size()), [&](auto rank) {
    return after.rings[rank].end != before.rings[rank].end;
  });
  if (after.dealt_to != before.dealt_to) {
    tear_dealing(t, before);
  } else if (end) {
    tear_end(t, before, after);
  } else {
    tear_element(t, before, after);
  }
}

/// How often, and how, the loader of a training is killed: before its calls number `at`, at + every, ...
struct Kills {
  int at;
  int every;  ///< 0: once.
  bool torn;
};

/// A training with steps, aborts and three teams, whose loader is killed. Returns the number of its calls.
int train(Shape shape, NumbersPlan plan, Kills kills) {
  SCOPED_TRACE(testing::Message() << plan.count << " elements, states " << plan.states << ", drop_last "
                                  << shape.drop_last << ", killed before call " << kills.at << " and every "
                                  << kills.every << ", torn " << kills.torn);
  Training t(shape, std::move(plan), 0b111);
  int calls = 0;
  Written before(t);
  const auto call = [&] {
    const bool due =
        calls == kills.at || (kills.every > 0 && calls > kills.at && (calls - kills.at) % kills.every == 0);
    if (due) {
      if (kills.torn && calls > 0) tear(t, before);
      t.kill();
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
  const auto deal_to = [&](RankMask team) {
    t.ask_for(team);
    while (t.dealing().dealt_to.load() != team) call();
  };
  work(7);
  work(1000);
  EXPECT_TRUE(t.step());
  work(5);
  deal_to(0b101);
  work(2);
  deal_to(0b110);
  t.abort();
  work(1000);
  EXPECT_TRUE(t.step());
  work(3);
  t.abort();
  deal_to(0b111);
  do {
    work(1000);
  } while (t.step());
  while (!t.loader().finished()) call();
  t.finish();
  return calls;
}

class Recovery : public testing::TestWithParam<std::tuple<bool, bool>> {
 protected:
  NumbersPlan plan(std::int64_t count) const { return {.count = count, .states = std::get<0>(GetParam())}; }
  Shape shape(int batch_size) const {
    return {.ranks = 3, .slots = 3, .batch_size = batch_size, .drop_last = std::get<1>(GetParam())};
  }
  void kill_everywhere(int every, bool torn) {
    for (const int batch_size : {1, 2, 3})
      for (const std::int64_t count : {36, 41}) {
        const int calls = train(shape(batch_size), plan(count), {.at = -1, .every = 0, .torn = false});
        for (int at = 0; at <= calls; ++at) train(shape(batch_size), plan(count), {at, every, torn});
      }
  }
};
INSTANTIATE_TEST_SUITE_P(States, Recovery, testing::Combine(testing::Bool(), testing::Bool()),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param) ? "WithStates" : "WithoutStates") +
                                  (std::get<1>(info.param) ? "DropLast" : "ShortLast");
                         });

TEST_P(Recovery, BetweenAnyTwoCallsLosesAndDoublesNothing) { kill_everywhere(0, false); }
TEST_P(Recovery, InsideAnyCallLosesAndDoublesNothing) { kill_everywhere(0, true); }
TEST_P(Recovery, AgainAndAgainLosesAndDoublesNothing) { kill_everywhere(50, true); }

TEST_P(Recovery, ResumesFromACheckpointOfAnyStepInANewSession) {
  for (const int batch_size : {1, 2})
    for (int steps = 0; steps < 7; ++steps)
      for (int ahead = 0; ahead < 10; ++ahead) {
        Training t(shape(batch_size), plan(40), 0b011);
        for (int i = 0; i < steps; ++i) {
          t.work();
          ASSERT_TRUE(t.step());
        }
        t.work(ahead);
        Training resumed(shape(batch_size), plan(40), 0b111);
        resumed.counters() = t.counters();
        std::fill_n(resumed.counters().batches, session::max_ranks, ahead);  // Of the new session's queues.
        resumed.dealing().source[0] = t.dealing().source[t.dealing().source_index.load()];
        resumed.finish();
      }
}

TEST(RecoveryReading, GoesOnInTheSlotsAsTheyAreAndReadsOnFromTheState) {
  const NumbersPlan plan{.count = 100, .states = true};
  Training t({.ranks = 2, .slots = 4, .batch_size = 3}, plan);
  t.work();
  ASSERT_TRUE(t.step());
  t.work(2);
  EXPECT_EQ(t.dealing().source[t.dealing().source_index.load()].element, 6u);
  const auto dealt = t.loader().dealt();
  EXPECT_EQ(dealt, 26u);
  t.kill();
  *plan.reads = 0;
  EXPECT_EQ(t.loader().dealt(), dealt);
  EXPECT_EQ(*plan.reads, 0u) << "a slow source does not hold up who makes the loader";
  t.work(20);
  EXPECT_EQ(t.loader().dealt(), dealt);
  EXPECT_EQ(*plan.reads, 20u) << "6 to 25 were dealt";
  t.work(1);
  EXPECT_EQ(t.loader().dealt(), dealt + 1);
  t.finish();
}

TEST(RecoveryReading, WithoutStatesReadsFromTheBeginning) {
  const NumbersPlan plan{.count = 100};
  Training t({.ranks = 2, .slots = 2}, plan);
  t.counters().elements = 30;
  t.work();
  EXPECT_EQ(*plan.reads, 34u);
  EXPECT_EQ(t.batch(0, 0), (std::vector<std::int64_t>{30}));
}

TEST(RecoveryReading, ASourceThatEndsSoonerThanBeforeIsAnError) {
  Training t({.ranks = 2, .slots = 2}, {.count = 30});
  t.counters().elements = 31;
  t.work();
  EXPECT_EQ(t.state(0, 0), session::BatchQueue::State::failed);
  EXPECT_EQ(
      session::BatchQueue(t.session(), 0).error(),
      "the data source ended after 30 elements; before it was read again it gave 31: it must give the same "
      "ones every time");
}

TEST(RecoveryReading, ASourceThatEndsBeforeWhatTheQueuesHoldIsAnError) {
  Training t({.ranks = 2, .slots = 2, .batch_size = 3}, {.count = 100});
  t.work(10);
  t.kill();
  t.plan().count = 9;
  t.work();
  EXPECT_EQ(
      session::BatchQueue(t.session(), 0).error(),
      "the data source ended after 9 elements; before it was read again it gave 10: it must give the same "
      "ones every time");
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

TEST(RecoveryReading, ForAnotherTeamDealsAllAnewThatIsNotConsumed) {
  Training t({.ranks = 3, .slots = 2, .batch_size = 2}, {.count = 50}, 0b011);
  t.work();
  ASSERT_TRUE(t.step());
  t.kill();
  t.begin_with(0b110);
  EXPECT_EQ(t.loader().dealt(), 4u);
  EXPECT_EQ(t.dealing().dealt_to.load(), 0b110u);
  t.finish();
}

TEST(RecoveryReading, WhereTheLastBatchIsShortAllIsReadAgain) {
  auto reads = std::make_shared<std::uint64_t>(0);
  Training t({.ranks = 2, .slots = 4, .batch_size = 2, .drop_last = false}, {.count = 7, .reads = reads});
  t.work();
  ASSERT_TRUE(t.step());
  ASSERT_EQ(t.batch(0, 1).size(), 2u);
  ASSERT_EQ(t.batch(1, 1).size(), 1u) << "short: the end of the data";
  t.kill();
  *reads = 0;
  t.work();
  EXPECT_EQ(*reads, 7u);
  EXPECT_EQ(t.batch(1, 1), (std::vector<std::int64_t>{5}));
  t.finish();
}

TEST(RecoveryReading, AStateBeyondTheDataCursorIsRefused) {
  Training t({}, {.count = 30, .states = true});
  auto& left = t.dealing().source[0];
  left.element = 5;
  left.bytes = 1;
  left.state[0] = '5';
  EXPECT_NE(test::message_of<SessionError>([&] {
              t.loader();
            }).find("of element 5) cannot be its own: the data cursor is 0"),
            std::string::npos);
}

}  // namespace
}  // namespace accelmgr::data
