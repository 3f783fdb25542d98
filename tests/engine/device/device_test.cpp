// Tests of one device: what its errors say, that nothing is kept, and how long it waits.
#include "base/cuda/device.hpp"

#include <gtest/gtest.h>

#include "message_of.hpp"
#include "refusal.hpp"
#include "rig.hpp"

namespace accelmgr::test {
namespace {

using Held = FakeCuda::Held;
namespace code = device::code;

TEST(Device, RegistersWholePages) {
  FakeCuda fake(FakeCuda::Execution::stepped);
  device::Device device(FakeCuda::runtime(), 0);
  const auto stream = device.make_stream();
  const auto block = device.allocate(8192);
  Pages memory(8192);
  const auto registration =
      device.register_pages(memory.span().subspan(100, 4000), device::register_read_write);
  device.copy(memory.span().data(), block.get(), 8192, device::Direction::to_host, stream.get());
  EXPECT_EQ(fake.unregistered_copies(), 0);
}

TEST(Device, EveryCallThatFailsThrows) {
  for (const char* function :
       {"cudaSetDevice", "cudaStreamCreateWithFlags", "cudaStreamWaitEvent", "cudaEventCreateWithFlags",
        "cudaEventRecord", "cudaEventRecordWithFlags", "cudaEventQuery", "cudaMemcpyAsync", "cudaMemsetAsync",
        "cudaHostRegister", "cudaHostAlloc", "cudaMalloc"}) {
    FakeCuda fake(FakeCuda::Execution::stepped);
    fake.fail(function, 1, code::illegal_address);
    try {
      device::Device device(FakeCuda::runtime(), 0);
      const auto stream = device.make_stream();
      const auto event = device.make_event();
      const auto block = device.allocate(4);
      const auto on_host = device.allocate_on_host(4);
      Pages memory(4);
      const auto registration = device.register_pages(memory.span(), device::register_read_write);
      device.copy(memory.span().data(), block.get(), 4, device::Direction::to_host, stream.get());
      device.zero(block.get(), 4, stream.get());
      device.record(event, stream.get());
      device.wait(stream.get(), event);
      device.happened(event);
      fake.begin_graph(stream.get());
      device.record_in_graph(event, stream.get());
      ADD_FAILURE() << function;
    } catch (const device::DeviceError& error) {
      EXPECT_EQ(error.function(), function);
      EXPECT_EQ(error.code(), code::illegal_address);
    }
    EXPECT_EQ(fake.held(), Held{}) << function;
  }
}

/// Wants the result as long as `wants` says so, which gets the number of times that it was asked.
class AskedWaiter final : public base::Waiter {
 public:
  explicit AskedWaiter(std::function<bool(int)> wants = [](int) { return true; })
      : wants_(std::move(wants)) {}
  bool wanted() override { return wants_(++asked); }
  int asked = 0;

 private:
  std::function<bool(int)> wants_;
};

/// A stream whose work ends when `released` is set.
struct HeldUp {
  explicit HeldUp(FakeCuda& fake) {
    fake.launch(stream.get(), [flag = released] {
      while (!*flag) std::this_thread::yield();
    });
    device.record(event, stream.get());
  }
  ~HeldUp() { *released = true; }

  std::shared_ptr<std::atomic<bool>> released = std::make_shared<std::atomic<bool>>(false);
  device::Device device{FakeCuda::runtime(), 0};
  device::Stream stream = device.make_stream();
  device::Event event = device.make_event();
};

TEST(Device, AWaitGivesSignsOfLifeUntilTheWorkIsDone) {
  FakeCuda fake(FakeCuda::Execution::threads);
  HeldUp held(fake);
  AskedWaiter sink([&](int asked) {
    if (asked == 3) *held.released = true;
    return true;
  });
  EXPECT_TRUE(held.device.wait(held.event, sink, 30));
  EXPECT_GE(sink.asked, 3);
}

TEST(Device, AWaitEndsWhenTheResultIsNotWanted) {
  FakeCuda fake(FakeCuda::Execution::threads);
  HeldUp held(fake);
  AskedWaiter sink([](int asked) { return asked < 2; });
  EXPECT_FALSE(held.device.wait(held.event, sink, 30));
  EXPECT_EQ(sink.asked, 2);
  EXPECT_FALSE(held.device.given_up());
}

TEST(Device, ThatHangsIsGivenUpAndNoCallWaitsForItAnyMore) {
  FakeCuda fake(FakeCuda::Execution::threads);
  Pages memory(4);
  {
    device::Device device(FakeCuda::runtime(), 0);
    const auto stream = device.make_stream();
    const auto event = device.make_event();
    const auto block = device.allocate(4);
    const auto registration = device.register_pages(memory.span(), device::register_read_write);
    fake.hang_after(0);
    device.record(event, stream.get());
    AskedWaiter sink;
    expect_contains(message_of<device::DeviceError>([&] { device.wait(event, sink, 0.5); }),
                    {"the device hangs: it has not done its work within 0.5 s"});
    EXPECT_TRUE(device.given_up());
    EXPECT_GE(sink.asked, 1);
    EXPECT_THROW(device.make_event(), device::DeviceError);
  }
  EXPECT_EQ(fake.endless_waits(), 0);
}

TEST(Device, ThatDoesNotSettleIsGivenUp) {
  FakeCuda fake(FakeCuda::Execution::threads);
  {
    device::Device device(FakeCuda::runtime(), 0);
    const auto stream = device.make_stream();
    const auto block = device.allocate(4);
    fake.hang_after(0);
    device.settle(stream.get(), 0.05);
    EXPECT_TRUE(device.given_up());
  }
  EXPECT_EQ(fake.endless_waits(), 0);
}

}  // namespace
}  // namespace accelmgr::test
