// Tests of the fake of CUDA's runtime: what it leaves open, and what it does not.
#include "engine/support/fake_cuda.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <set>
#include <string>

namespace accelmgr::test {
namespace {

using Execution = FakeCuda::Execution;
namespace code = device::code;

/// A fake with two streams and an event.
class Fake : public testing::Test {
 protected:
  void start(Execution execution, std::uint64_t seed = 0) {
    fake.emplace(execution, seed);
    for (auto& stream : streams) ASSERT_EQ(cuda.stream_create(&stream, 0), code::success);
    ASSERT_EQ(cuda.event_create(&event, 0), code::success);
  }
  /// Queues a kernel that writes down `letter`.
  void launch(int stream, char letter) {
    fake->launch(streams.at(static_cast<std::size_t>(stream)), [this, letter] { done += letter; });
  }
  /// Polls until all that is queued on the stream is done, or an error comes.
  device::Code finish(int stream) {
    device::EventHandle end = nullptr;
    cuda.event_create(&end, 0);
    cuda.event_record(end, streams.at(static_cast<std::size_t>(stream)));
    auto result = cuda.event_query(end);
    while (result == code::not_ready) result = cuda.event_query(end);
    return result;
  }

  const device::Runtime cuda = FakeCuda::runtime();
  std::optional<FakeCuda> fake;
  std::array<device::StreamHandle, 2> streams{};
  device::EventHandle event = nullptr;
  std::string done;
};

TEST_F(Fake, DoesNothingUntilTheHostPolls) {
  start(Execution::stepped);
  launch(0, 'a');
  EXPECT_EQ(done, "");
  EXPECT_EQ(finish(0), code::success);
  EXPECT_EQ(done, "a");
}

TEST_F(Fake, KeepsTheOrderOfAStreamAndNoOther) {
  std::set<std::string> orders;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    done.clear();
    start(Execution::stepped, seed);
    launch(0, 'a');
    launch(0, 'b');
    launch(1, 'x');
    finish(0);
    finish(1);
    orders.insert(done);
    fake.reset();
  }
  EXPECT_EQ(orders, (std::set<std::string>{"abx", "axb", "xab"}));
}

TEST_F(Fake, KeepsTheOrderOfAnEvent) {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    done.clear();
    start(Execution::stepped, seed);
    launch(0, 'a');
    cuda.event_record(event, streams[0]);
    cuda.stream_wait_event(streams[1], event, 0);
    cuda.event_record(event, streams[1]);  // The wait is for what was recorded before.
    launch(1, 'x');
    finish(1);
    EXPECT_EQ(done, "ax");
    fake.reset();
  }
}

TEST_F(Fake, ExecutesStreamsAsThreadsWithoutAPoll) {
  start(Execution::threads);
  std::atomic<int> kernels = 0;
  for (const auto stream : streams) fake->launch(stream, [&] { ++kernels; });
  while (kernels < 2) std::this_thread::yield();
  EXPECT_EQ(finish(0), code::success);
  EXPECT_EQ(finish(1), code::success);
}

TEST_F(Fake, ThatIsLazyExecutesOnlyWhatTheEventNeeds) {
  start(Execution::lazy);
  launch(0, 'a');
  cuda.event_record(event, streams[0]);
  launch(0, 'b');
  cuda.stream_wait_event(streams[1], event, 0);
  launch(1, 'x');
  EXPECT_EQ(finish(1), code::success);
  EXPECT_EQ(done, "ax");
  EXPECT_EQ(finish(0), code::success);
  EXPECT_EQ(done, "axb");
}

TEST_F(Fake, CopiesLateAndTellsOfMemoryThatIsNotRegistered) {
  start(Execution::stepped);
  void* block = nullptr;
  ASSERT_EQ(cuda.allocate(&block, sizeof(float)), code::success);
  EXPECT_TRUE(std::isnan(*static_cast<float*>(block)));
  float registered = 1, other = 2;
  ASSERT_EQ(cuda.host_register(&registered, sizeof registered, 0), code::success);
  cuda.copy(block, &registered, sizeof registered, device::Direction::to_device, streams[0]);
  EXPECT_TRUE(std::isnan(*static_cast<float*>(block)));
  EXPECT_EQ(fake->unregistered_copies(), 0);
  finish(0);
  EXPECT_EQ(*static_cast<float*>(block), 1);
  cuda.copy(block, &other, sizeof other, device::Direction::to_device, streams[0]);
  EXPECT_EQ(*static_cast<float*>(block), 2) << "it was executed at once";
  EXPECT_EQ(fake->unregistered_copies(), 1);
  EXPECT_EQ(cuda.copy(&other, &registered, sizeof other, device::Direction::to_host, streams[0]),
            code::invalid_value)
      << "this is no memory of the device";
  fake->take_any_memory();
  EXPECT_EQ(cuda.copy(&other, &registered, sizeof other, device::Direction::to_host, streams[0]),
            code::success);
  EXPECT_NE(cuda.host_register(&registered, sizeof registered, 0), code::success) << "twice";
}

TEST_F(Fake, FillsAndCopiesItsOwnMemoryLateAndInOrder) {
  start(Execution::stepped);
  void *from = nullptr, *to = nullptr;
  ASSERT_EQ(cuda.allocate(&from, 4), code::success);
  ASSERT_EQ(cuda.allocate(&to, 4), code::success);
  ASSERT_EQ(cuda.fill(from, 5, 4, streams[0]), code::success);
  ASSERT_EQ(cuda.copy(to, from, 4, device::Direction::on_device, streams[0]), code::success);
  EXPECT_NE(*static_cast<char*>(from), 5);
  EXPECT_EQ(finish(0), code::success);
  EXPECT_EQ(*static_cast<char*>(to), 5);
  char other = 0;
  EXPECT_EQ(cuda.fill(&other, 5, 1, streams[0]), code::invalid_value);
  EXPECT_EQ(cuda.copy(&other, from, 1, device::Direction::on_device, streams[0]), code::invalid_value);
  EXPECT_EQ(cuda.allocate(&to, std::size_t{1} << 50), code::out_of_memory);
}

TEST_F(Fake, StaysBrokenAfterAnErrorThatSticks) {
  start(Execution::stepped);
  fake->break_after(1, code::illegal_address);
  launch(0, 'a');
  launch(0, 'b');
  EXPECT_EQ(finish(0), code::illegal_address);
  EXPECT_EQ(done, "a");
  void* block = nullptr;
  EXPECT_EQ(cuda.allocate(&block, 1), code::illegal_address);
}

TEST_F(Fake, ThatHangsLetsPollsReturnAndCountsWhatWouldNot) {
  start(Execution::threads);
  void* block = nullptr;
  ASSERT_EQ(cuda.allocate(&block, 1), code::success);
  fake->hang_after(0);
  cuda.event_record(event, streams[0]);
  EXPECT_EQ(cuda.event_query(event), code::not_ready);
  cuda.free(block);
  EXPECT_EQ(fake->endless_waits(), 1);
}

}  // namespace
}  // namespace accelmgr::test
