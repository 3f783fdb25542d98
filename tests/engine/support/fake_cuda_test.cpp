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

TEST_F(Fake, HasMemoryOfItsOwnWhoseValuesAreNoNumbersAtFirst) {
  start(Execution::stepped);
  void* block = nullptr;
  float own = 1, other = 2;
  ASSERT_EQ(cuda.allocate(&block, sizeof own), code::success);
  EXPECT_TRUE(std::isnan(*static_cast<float*>(block)));
  EXPECT_EQ(cuda.fill(&other, 5, sizeof other, streams[0]), code::invalid_value);
  for (const auto direction : {device::Direction::to_host, device::Direction::on_device})
    EXPECT_EQ(cuda.copy(&other, &own, sizeof other, direction, streams[0]), code::invalid_value);
  fake->take_any_memory();
  EXPECT_EQ(cuda.copy(&other, &own, sizeof other, device::Direction::to_host, streams[0]), code::success);
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
