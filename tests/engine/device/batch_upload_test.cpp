#include "engine/device/batch_upload.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "rig.hpp"

namespace accelmgr::test {
namespace {

constexpr std::uint64_t orders = 40;
constexpr std::size_t batch_values = 5000;  // More than a page.

/// A device that adds up batches. A number of the state, which it also changes, comes behind its work.
class Batches {
 public:
  explicit Batches(std::uint64_t seed, FakeCuda::Execution execution = FakeCuda::Execution::stepped)
      : sink(manifest, true), fake(execution, seed) {
    upload.emplace(device, sink, copies.get(), compute.get(), 30);
    results.emplace(device, compute.get());
    fake.launch(compute.get(), [this] { *floats(sum) = *floats(state) = 0; });
  }
  static float* floats(const device::Memory& memory) { return reinterpret_cast<float*>(memory.get()); }

  /// False: the sink wants no more.
  bool stage(float value, std::size_t count = batch_values) {
    const auto staged = upload->stage(count * sizeof(float));
    if (!staged) return false;
    EXPECT_GE(staged->size(), count * sizeof(float));
    std::fill_n(reinterpret_cast<float*>(staged->data()), count, value);
    return true;
  }
  void compute_with(float value) {
    ASSERT_TRUE(stage(value));
    auto& target = targets.emplace_back(device.allocate(batch_values * sizeof(float)));
    upload->load(std::vector<device::BatchUpload::Part>{{target.get(), 0, batch_values * sizeof(float)}});
    fake.launch(compute.get(), [this, from = floats(target)] {
      *floats(sum) += from[0] + from[batch_values - 1];
      *floats(state) += 1;
    });
  }
  void set_state(float value) {
    ASSERT_TRUE(stage(value, 2));
    upload->load_behind(std::vector<device::BatchUpload::Part>{{state.get(), sizeof(float), sizeof(float)}});
  }
  /// The sum and the state.
  std::pair<float, float> read() {
    const std::vector<device::Results::Part> parts = {{sum.get(), 0, sizeof(float)},
                                                      {state.get(), 64, sizeof(float)}};
    const auto memory = results->read(parts, 64 + sizeof(float));
    const auto done = device.make_event();
    device.record(done, compute.get());
    EXPECT_TRUE(device.wait(done, sink, 30));
    return {*reinterpret_cast<const float*>(memory.data()),
            *reinterpret_cast<const float*>(memory.data() + 64)};
  }

  session::Manifest manifest;
  NotingSink sink;
  FakeCuda fake;
  device::Device device{FakeCuda::runtime(), 0};
  device::Stream compute = device.make_stream(), copies = device.make_stream();
  device::Memory sum = device.allocate(sizeof(float)), state = device.allocate(sizeof(float));
  std::vector<device::Memory> targets;
  std::optional<device::BatchUpload> upload;
  std::optional<device::Results> results;
};

/// Whether the batches and the state are those of the test.
bool right(Batches& batches) {
  for (const float value : {1.0F, 10.0F, 100.0F, 1000.0F}) batches.compute_with(value);
  batches.set_state(7);
  for (const float value : {20.0F, 30.0F, 40.0F}) batches.compute_with(value);
  return batches.read() == std::pair(2 * 1201.0F, 10.0F);
}

TEST(BatchUpload, IsRightInEveryOrderOfExecution) {
  for (std::uint64_t seed = 0; seed < orders; ++seed) {
    Batches batches(seed);
    EXPECT_TRUE(right(batches)) << seed;
    EXPECT_EQ(batches.fake.unregistered_copies(), 0);
  }
  Batches batches(0, FakeCuda::Execution::threads);
  EXPECT_TRUE(right(batches));
}

TEST(BatchUpload, NeedsEachOfItsWaits) {
  const auto waits = [] {
    Batches batches(0);
    right(batches);
    return batches.fake.waits();
  }();
  // For each of two slots the compute stream waits and the host waits. The test waits for the compute stream.
  ASSERT_EQ(waits.size(), 2 * 2 + 1);
  for (const auto& wait : waits) {
    bool wrong = false;
    for (std::uint64_t seed = 0; seed < orders && !wrong; ++seed) {
      Batches batches(seed);
      batches.fake.leave_out(wait);
      wrong = !right(batches);
    }
    EXPECT_TRUE(wrong) << "of " << wait.waiter << " for event " << wait.event;
  }
}

TEST(BatchUpload, RunsWhileTheBatchBeforeComputes) {
  Batches batches(0, FakeCuda::Execution::lazy);
  batches.compute_with(1);
  batches.compute_with(2);
  ASSERT_TRUE(batches.stage(3)) << "the copy is awaited, the computation is not";
  EXPECT_EQ(*Batches::floats(batches.targets[0]), 1.0F);
  EXPECT_TRUE(std::isnan(*Batches::floats(batches.sum))) << "nothing was computed";
}

TEST(BatchUpload, GivesUpWaitingForAnAttemptThatIsOver) {
  Batches batches(0);
  batches.compute_with(1);
  batches.compute_with(2);
  batches.fake.hang_after(0);
  batches.sink.asked = [] { return false; };
  EXPECT_FALSE(batches.stage(3));
  batches.device.give_up();  // Its end need not wait.
}

TEST(BatchUpload, GrowsWithItsBatches) {
  Batches batches(0);
  batches.set_state(5);
  batches.compute_with(1);
  batches.compute_with(2);
  EXPECT_EQ(batches.read(), std::pair(6.0F, 7.0F));
}

TEST(Results, MayGrowWhileEarlierOnesAreUnderWay) {
  Batches batches(0);
  batches.compute_with(1);
  const std::vector<device::Results::Part> part = {{batches.sum.get(), 0, sizeof(float)}};
  const auto small = batches.results->read(part, sizeof(float));
  const auto large = batches.results->read(part, 3 * 4096);
  EXPECT_GE(large.size(), 3u * 4096);
  batches.read();
  for (const auto& memory : {small, large}) EXPECT_EQ(*reinterpret_cast<const float*>(memory.data()), 2.0F);
}

TEST(BatchUpload, GivesEverythingBack) {
  Batches batches(0);
  right(batches);
  batches.compute_with(1);  // Its copy is under way.
  batches.results.reset();
  batches.upload.reset();
  EXPECT_EQ(batches.fake.held().registrations, 0u);
  EXPECT_EQ(batches.fake.early_unregistrations(), 0);
}

TEST(BatchUpload, KeepsItsMemoryFromADeviceThatWasGivenUp) {
  Batches batches(0);
  batches.compute_with(1);
  batches.fake.hang_after(0);
  batches.device.give_up();
  batches.upload.reset();
  EXPECT_EQ(batches.fake.held().registrations, 1u) << "it makes no call";
  EXPECT_EQ(batches.fake.endless_waits(), 0);
}

}  // namespace
}  // namespace accelmgr::test
