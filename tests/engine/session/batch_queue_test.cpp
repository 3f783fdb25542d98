#include "engine/session/batch_queue.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "session_support.hpp"

namespace accelmgr::session {
namespace {

void release(Session& s, std::uint64_t batches) { s.counters(s.word().index).batches[0] = batches; }
bool never() { return false; }

/// The queue of one rank, which has three slots.
class BatchQueueTest : public testing::Test {
 protected:
  void publish(std::uint64_t elements) {
    ASSERT_NE(queue.claim(), nullptr);
    queue.publish(elements);
  }

  SmallSession small = small_session(1, {1}, 3);
  Session& s = small.session;
  BatchQueueWriter queue{s, 0};
  BatchQueue::Filled filled{};
};

TEST_F(BatchQueueTest, IsBoundedUntilCommittedStepsReleaseSlots) {
  for (int i = 0; i < 3; ++i) publish(4);
  EXPECT_EQ(queue.claim(), nullptr);
  release(s, 1);
  EXPECT_NE(queue.claim(), nullptr);
}

TEST_F(BatchQueueTest, WaitingEndsWhenItsCallerGivesUp) {
  int asked = 0;
  EXPECT_EQ(queue.wait(0, filled, 0, [&] { return ++asked == 3; }), BatchQueue::State::empty);
}

TEST_F(BatchQueueTest, AnotherProducerFindsWhatIsInTheSlotUnderWay) {
  std::memcpy(queue.claim(), "element", 8);
  queue.fill(1);
  BatchQueueWriter second(s, 0);
  EXPECT_EQ(second.filling(), 1u);
  EXPECT_STREQ(reinterpret_cast<const char*>(second.slot(0)), "element");
  second.publish(2);
  EXPECT_EQ(queue.filling(), 0u);
  EXPECT_EQ(queue.elements(0), 2u);
}

TEST_F(BatchQueueTest, AShortStepHasBatchesWithoutElements) {
  publish(0);
  queue.finish();
  EXPECT_EQ(queue.look(0, filled), BatchQueue::State::none);
  EXPECT_EQ(queue.look(1, filled), BatchQueue::State::ended);
}

TEST_F(BatchQueueTest, ABatchKnowsWhatWasLeftOutBeforeIt) {
  queue.leave_out(7);
  queue.fill(1);
  EXPECT_EQ(BatchQueueWriter(s, 0).left_out(0), 7u) << "another producer finds it";
  queue.publish(1);
  queue.publish(1);
  ASSERT_EQ(queue.look(0, filled), BatchQueue::State::filled);
  EXPECT_EQ(filled.left_out, 7u);
  EXPECT_EQ(filled.elements, 1u);
  EXPECT_EQ(queue.left_out(1), 0u);
  queue.rewind();
  EXPECT_EQ(queue.left_out(0), 0u) << "it was taken back";
}

TEST_F(BatchQueueTest, RewindingTakesBackWhatIsNotReleased) {
  for (int i = 0; i < 2; ++i) publish(4);
  queue.claim();
  queue.fill(3);
  queue.finish("file went away");
  release(s, 1);
  queue.rewind();
  EXPECT_EQ(queue.published(), 1u);
  EXPECT_EQ(queue.filling(), 0u);
  EXPECT_EQ(queue.look(1, filled), BatchQueue::State::empty);
  publish(5);
  queue.finish();
  ASSERT_EQ(queue.look(1, filled), BatchQueue::State::filled);
  EXPECT_EQ(filled.elements, 5u);
  EXPECT_EQ(queue.look(2, filled), BatchQueue::State::ended);
}

TEST_F(BatchQueueTest, EndsAfterTheLastBatchAndAReopenedQueueKeepsItsBatches) {
  publish(1);
  queue.finish("file went away");
  EXPECT_EQ(queue.wait(0, filled, 0, never), BatchQueue::State::filled);
  EXPECT_EQ(queue.wait(1, filled, 0, never), BatchQueue::State::failed);
  EXPECT_EQ(queue.error(), "file went away");
  queue.reopen();
  EXPECT_EQ(queue.look(0, filled), BatchQueue::State::filled);
  EXPECT_EQ(queue.look(1, filled), BatchQueue::State::empty);
  queue.finish();
  EXPECT_EQ(queue.wait(1, filled, 0, never), BatchQueue::State::ended);
}

TEST_F(BatchQueueTest, EveryBatchArrivesOnceAndInOrderBetweenThreads) {
  BatchQueueWriter consumer(s, 0);
  constexpr std::uint64_t batches = 5000, most = 64;
  std::atomic<std::uint64_t> consumed{0};
  std::jthread thread([&] {
    for (std::uint64_t b = 0; b < batches; ++b) {
      while (b - consumed.load() >= 3) std::this_thread::yield();
      // The producer's own thread releases the slots of a commit, so the state copy has one writer here.
      release(s, consumed.load());
      auto* slot = queue.claim();
      std::memcpy(slot, &b, sizeof b);
      queue.publish(b % most + 1);
    }
    queue.finish();
  });
  for (std::uint64_t b = 0; b < batches; ++b) {
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
