#include "engine/data/loader.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <thread>

#include "base/ipc/epoch.hpp"
#include "engine/data/fixtures.hpp"
#include "engine/data/training.hpp"
#include "message_of.hpp"

namespace accelmgr::data {
namespace {

using session::BatchQueue;
using Batch = std::vector<std::int64_t>;

TEST(Loader, AFullQueueStopsTheShardingAndWhatIsThereStaysUsable) {
  Training t({.slots = 1}, {.count = 100});
  t.work();
  EXPECT_EQ(t.loader().assigned(), 2u) << "device 0 is full";
  EXPECT_FALSE(t.loader().finished());
  EXPECT_EQ(t.batch(1, 0), (Batch{1}));
  t.counters().batches[0] = 1;
  t.work();
  EXPECT_EQ(t.loader().assigned(), 3u);
  EXPECT_EQ(t.batch(0, 1), (Batch{2}));
}

TEST(Loader, ARankWithASmallShareIsNotFilledFurtherAheadThanOthers) {
  Training t({.slots = 10, .prefetch = 2}, {.count = 100}, {0b11, {1, 3}});
  t.work();
  EXPECT_EQ(t.loader().assigned(), 7u) << "rank 1 holds a step and two elements";
  EXPECT_EQ(t.batch(1, 4), (Batch{6}));
  ASSERT_TRUE(t.step());
  t.work();
  EXPECT_EQ(t.loader().assigned(), 11u);
}

TEST(Loader, AShareThatNoQueueHoldsOrThatIsNoneAndATeamOfOthersAreRefused) {
  for (const auto& [team, part] : {std::pair(Team(0b11, {1, 0}), "rank 1 cannot compute 0 micro-batches"),
                                   std::pair(Team(0b11, {1, 5}), "rank 1 cannot compute 5 micro-batches"),
                                   std::pair(Team(0b110), "mask 0x6: the session has 2")}) {
    Training t({.ranks = 2, .slots = 4}, {.count = 20}, team);
    const auto text = test::message_of<SessionError>([&] { t.loader(); });
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

TEST(Loader, AnUnevenEndMakesAShortBatchWhenAsked) {
  Training t({.batch_size = 3, .drop_last = false}, {.count = 7});
  t.work();
  EXPECT_EQ(t.batch(0, 1), (Batch{6}));
  EXPECT_EQ(t.state(1, 1), BatchQueue::State::none);
  EXPECT_EQ(t.state(0, 2), BatchQueue::State::ended);
  EXPECT_EQ(t.state(1, 2), BatchQueue::State::ended);
  EXPECT_EQ(t.loader().dropped(), 0u);
}

TEST(Loader, EveryEpochEndsWithAShortStepOrLeavesItOut) {
  for (const bool drop_last : {false, true}) {
    Training t({.batch_size = 2, .drop_last = drop_last}, {.count = 20, .epoch = 10});
    t.work();
    EXPECT_EQ(t.batch(0, 1), (Batch{4, 6}));
    EXPECT_EQ(t.batch(0, 2), drop_last ? (Batch{10, 12}) : (Batch{8}));
    int steps = 0;
    for (; t.step(); ++steps) t.work();
    EXPECT_EQ(steps, drop_last ? 4 : 6);
    EXPECT_EQ(t.left_out(), drop_last ? 2u : 0u);
    EXPECT_EQ(t.cursor(), drop_last ? 18u : 20u);
    EXPECT_TRUE(t.loader().finished());
    EXPECT_EQ(t.loader().dropped(), drop_last ? 4u : 0u);
  }
}

TEST(Loader, AnEpochThatFillsItsStepsLeavesNothingOut) {
  for (const bool drop_last : {false, true}) {
    Training t({.batch_size = 2, .drop_last = drop_last}, {.count = 24, .epoch = 8});
    t.finish();
    EXPECT_EQ(t.cursor(), 24u);
    EXPECT_EQ(t.left_out(), 0u);
  }
}

TEST(Loader, DataThatMakeNoStepAreAnError) {
  for (const std::int64_t epoch : {0, 12}) {
    Training t({.batch_size = 8}, {.count = 12 + epoch, .epoch = epoch});
    t.work();
    EXPECT_EQ(t.state(0, 0), BatchQueue::State::failed);
    EXPECT_EQ(t.state(1, 0), BatchQueue::State::failed);
    test::expect_contains(BatchQueue(t.session(), 0).error(),
                          {"12 elements make no step: a step takes 16 (batches: 2, of 8"});
  }
}

/// Lets the source do `act` before it gives number 3. Checks that the queues of both ranks fail, and returns
/// their error.
std::string error_of(const std::function<void(ElementWriter&)>& act) {
  const auto interfere = [&](std::int64_t number, ElementWriter& element) {
    if (number == 3) act(element);
  };
  Training t({}, {.count = 100, .interfere = interfere});
  t.work();
  EXPECT_EQ(t.state(1, 0), BatchQueue::State::filled);
  EXPECT_EQ(t.state(1, 1), BatchQueue::State::failed);
  EXPECT_EQ(t.state(0, 2), BatchQueue::State::failed);
  return BatchQueue(t.session(), 0).error();
}

TEST(Loader, AnErrorOfTheSourceReachesEveryDevice) {
  EXPECT_EQ(error_of([](ElementWriter&) { throw DataError("number 3 is missing"); }), "number 3 is missing");
  EXPECT_EQ(error_of([](ElementWriter&) { throw 42; }), "an exception of type int without a text");
  EXPECT_EQ(error_of([](ElementWriter& element) { element.bytes(2); }),
            "field 2 is written, but an element has 2 fields");
}

// Number 3 lies in the second of four slots of the last rank. The overruns stay in its queue, which ends with
// a guard of one page.
TEST(Loader, WhatIsWrittenBehindARowIsAnErrorWhateverWasThere) {
  for (const std::size_t field : {0, 1})
    for (const std::size_t count : {1, 16, 64, 1000}) {
      const auto overrun = [&](ElementWriter& element) {
        const auto row = element.bytes(field);
        std::memset(row.data(), 0, row.size() + count);
      };
      test::expect_contains(
          error_of(overrun),
          {field == 0 ? "'number', which has 8 bytes" : "'tag', which has 3 bytes", "element 3"});
    }
}

TEST(Loader, SaysWhatTheSourceReadsWhileItReads) {
  Loader* loader = nullptr;
  std::vector<std::string> readings;
  const auto look = [&](std::int64_t number, ElementWriter&) {
    const auto reading = loader->reading();
    ASSERT_TRUE(reading.has_value());
    EXPECT_EQ(reading->element, static_cast<std::uint64_t>(number));
    EXPECT_GT(reading->since_ns, 0);
    readings.push_back(reading->what);
  };
  Training t({}, {.count = 2, .interfere = look});
  loader = &t.loader();
  EXPECT_FALSE(loader->reading());
  t.work();
  EXPECT_FALSE(loader->reading());
  EXPECT_EQ(readings, (std::vector<std::string>{"numbers[0]", "numbers[1]"}));
}

TEST(Loader, LeavesTheNewestStateOfTheSourceUpToTheCursor) {
  Training t({.slots = 3, .batch_size = 2, .micro_batches = 2}, {.count = 1000, .states = true});
  for (int step = 0; step < 20; ++step) {
    t.work();
    const auto& left = t.sharding().source[t.sharding().source_index.load()];
    EXPECT_EQ(left.element, t.cursor());
    if (step > 0) {
      EXPECT_EQ(std::string(left.state, left.bytes), std::to_string(t.cursor()));
    }
    ASSERT_TRUE(t.step());
  }
}

TEST(Loader, WhoReadsTheStateBetweenAttemptsMeetsOneChangeAtMost) {
  Training t({.slots = 2, .batch_size = 2, .micro_batches = 2}, {.count = 1000, .states = true});
  const auto copies = [&] {
    const auto& source = t.sharding().source;
    return std::array{std::string(source[0].state, source[0].bytes),
                      std::string(source[1].state, source[1].bytes)};
  };
  t.work();
  for (int step = 0; step < 20; ++step) {
    ASSERT_TRUE(t.step());
    const auto index = t.sharding().source_index.load();
    const auto before = copies();
    t.work();
    t.abort();
    t.work();
    EXPECT_EQ(t.sharding().source_index.load(), index ^ 1);
    EXPECT_EQ(copies()[index], before[index]);
  }
}

TEST(Loader, AStateOfTheGreatestLengthIsKeptAndALongerOneEndsTheData) {
  Training fits({}, {.count = 20, .states = true, .state_bytes = BatchSource::max_state_bytes});
  fits.finish();
  EXPECT_EQ(fits.sharding().source[fits.sharding().source_index.load()].bytes, BatchSource::max_state_bytes);
  Training t({}, {.count = 20, .states = true, .state_bytes = BatchSource::max_state_bytes + 1});
  t.work();
  EXPECT_EQ(t.state(1, 0), BatchQueue::State::failed);
  EXPECT_EQ(BatchQueue(t.session(), 1).error(),
            "the data source's state at element 0 has 262145 bytes; at most 262144 can be kept");
}

TEST(Loader, RunsOnAfterTheEndOfTheDataUntilTheSessionStops) {
  Training t({.ranks = 2, .batch_size = 2}, {.count = 7});
  auto& control = t.session().control();
  auto& loader = t.loader();
  std::jthread thread([&] { loader.run(); });
  BatchQueue::Filled filled{};
  EXPECT_EQ(BatchQueue(t.session(), 0).wait(1, filled, 0, [] { return false; }), BatchQueue::State::filled);
  EXPECT_EQ(BatchQueue(t.session(), 1).wait(1, filled, 0, [] { return false; }), BatchQueue::State::ended);
  t.ask_for(0b10);
  ipc::advance(control.finish);
  for (;;) {
    const auto seen = ipc::load(control.readiness);
    if (t.sharding().assigned_to.load() == 0b10) break;
    ipc::wait_changed(control.readiness, seen, 20'000'000, 0);
  }
  EXPECT_EQ(BatchQueue(t.session(), 1).wait(2, filled, 0, [] { return false; }), BatchQueue::State::filled);
  EXPECT_EQ(BatchQueue(t.session(), 1).wait(3, filled, 0, [] { return false; }), BatchQueue::State::ended);
  control.stopping.store(1);
  ipc::advance(control.finish);
}

}  // namespace
}  // namespace accelmgr::data
