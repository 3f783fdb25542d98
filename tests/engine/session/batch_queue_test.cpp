#include "engine/session/batch_queue.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "session_support.hpp"

namespace accelmgr::session {
namespace {

void release(Session& s, std::uint64_t batches) { s.counters(s.word().index).batches[0] = batches; }
bool never() { return false; }

TEST(BatchQueue, IsBoundedUntilCommittedStepsReleaseSlots) {
  auto [manifest, s] = small_session(1, {1}, 2);
  BatchQueueWriter queue(s, 0);
  for (int i = 0; i < 2; ++i) {
    ASSERT_NE(queue.claim(), nullptr);
    queue.publish(4);
  }
  EXPECT_EQ(queue.claim(), nullptr);
  release(s, 1);
  EXPECT_NE(queue.claim(), nullptr);
}

TEST(BatchQueue, TheEndComesAfterTheLastBatch) {
  auto [manifest, s] = small_session(1, {1}, 2);
  BatchQueueWriter queue(s, 0);
  queue.claim();
  queue.publish(1);
  queue.finish();
  BatchQueue::Filled filled{};
  EXPECT_EQ(queue.wait(0, filled, 0, never), BatchQueue::State::filled);
  EXPECT_EQ(queue.wait(1, filled, 0, never), BatchQueue::State::ended);
}

TEST(BatchQueue, AnErrorReachesTheConsumer) {
  auto [manifest, s] = small_session(1, {1}, 2);
  BatchQueueWriter queue(s, 0);
  queue.finish("file went away");
  BatchQueue::Filled filled{};
  EXPECT_EQ(queue.wait(0, filled, 0, never), BatchQueue::State::failed);
  EXPECT_EQ(queue.error(), "file went away");
}

TEST(BatchQueue, WaitingEndsWhenItsCallerGivesUp) {
  auto [manifest, s] = small_session(1, {1}, 2);
  BatchQueueWriter queue(s, 0);
  BatchQueue::Filled filled{};
  int asked = 0;
  EXPECT_EQ(queue.wait(0, filled, 0, [&] { return ++asked == 3; }), BatchQueue::State::empty);
}

TEST(BatchQueue, AnotherProducerFindsWhatIsInTheSlotUnderWay) {
  auto [manifest, s] = small_session(1, {1}, 2);
  BatchQueueWriter first(s, 0);
  std::memcpy(first.claim(), "element", 8);
  first.fill(1);
  BatchQueueWriter second(s, 0);
  EXPECT_EQ(second.filling(), 1u);
  EXPECT_STREQ(reinterpret_cast<const char*>(second.slot(0)), "element");
  second.publish(2);
  EXPECT_EQ(first.filling(), 0u);
  EXPECT_EQ(first.elements(0), 2u);
}

TEST(BatchQueue, AShortStepHasBatchesWithoutElements) {
  auto [manifest, s] = small_session(1, {1}, 2);
  BatchQueueWriter queue(s, 0);
  queue.claim();
  queue.publish(0);
  queue.finish();
  BatchQueue::Filled filled{};
  EXPECT_EQ(queue.look(0, filled), BatchQueue::State::none);
  EXPECT_EQ(queue.look(1, filled), BatchQueue::State::ended);
}

TEST(BatchQueue, ABatchKnowsWhatWasLeftOutBeforeIt) {
  auto [manifest, s] = small_session(1, {1}, 2);
  BatchQueueWriter queue(s, 0);
  queue.leave_out(7);
  queue.fill(1);
  EXPECT_EQ(BatchQueueWriter(s, 0).left_out(0), 7u) << "another producer finds it";
  queue.publish(1);
  queue.publish(1);
  BatchQueue::Filled filled{};
  ASSERT_EQ(queue.look(0, filled), BatchQueue::State::filled);
  EXPECT_EQ(filled.left_out, 7u);
  EXPECT_EQ(filled.elements, 1u);
  EXPECT_EQ(queue.left_out(1), 0u);
  queue.rewind();
  EXPECT_EQ(queue.left_out(0), 0u) << "it was taken back";
}

TEST(BatchQueue, RewindingTakesBackWhatIsNotReleased) {
  auto [manifest, s] = small_session(1, {1}, 3);
  BatchQueueWriter queue(s, 0);
  for (int i = 0; i < 2; ++i) {
    queue.claim();
    queue.publish(4);
  }
  queue.claim();
  queue.fill(3);
  queue.finish("file went away");
  release(s, 1);
  queue.rewind();
  EXPECT_EQ(queue.published(), 1u);
  EXPECT_EQ(queue.filling(), 0u);
  BatchQueue::Filled filled{};
  EXPECT_EQ(queue.look(1, filled), BatchQueue::State::empty);
  queue.claim();
  queue.publish(5);
  queue.finish();
  ASSERT_EQ(queue.look(1, filled), BatchQueue::State::filled);
  EXPECT_EQ(filled.elements, 5u);
  EXPECT_EQ(queue.look(2, filled), BatchQueue::State::ended);
}

TEST(BatchQueue, AReopenedQueueHasNoEndAndKeepsItsBatches) {
  auto [manifest, s] = small_session(1, {1}, 2);
  BatchQueueWriter queue(s, 0);
  queue.claim();
  queue.publish(1);
  queue.finish("file went away");
  queue.reopen();
  BatchQueue::Filled filled{};
  EXPECT_EQ(queue.look(0, filled), BatchQueue::State::filled);
  EXPECT_EQ(queue.look(1, filled), BatchQueue::State::empty);
  queue.finish();
  EXPECT_EQ(queue.look(1, filled), BatchQueue::State::ended);
}

TEST(BatchQueue, EveryBatchArrivesOnceAndInOrderBetweenThreads) {
  auto [manifest, s] = small_session(1, {1}, 3);
  BatchQueueWriter producer(s, 0), consumer(s, 0);
  constexpr std::uint64_t batches = 5000, most = 64;
  std::atomic<std::uint64_t> consumed{0};
  std::jthread thread([&, &s = s] {
    for (std::uint64_t b = 0; b < batches; ++b) {
      while (b - consumed.load() >= 3) std::this_thread::yield();
      // The producer's own thread releases the slots of a commit, so the state copy has one writer here.
      release(s, consumed.load());
      auto* slot = producer.claim();
      std::memcpy(slot, &b, sizeof b);
      producer.publish(b % most + 1);
    }
    producer.finish();
  });
  for (std::uint64_t b = 0; b < batches; ++b) {
    BatchQueue::Filled filled{};
    ASSERT_EQ(consumer.wait(b, filled, b % 2 ? 50 : 0, never), BatchQueue::State::filled);
    std::uint64_t value = 0;
    std::memcpy(&value, filled.slot, sizeof value);
    ASSERT_EQ(value, b);
    ASSERT_EQ(filled.elements, b % most + 1);
    consumed.store(b + 1);
  }
}

}  // namespace
}  // namespace accelmgr::session
