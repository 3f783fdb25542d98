#include "device/gradient_copies.hpp"

#include <gtest/gtest.h>

#include <limits>

#include "accelmgr/errors.hpp"
#include "message_of.hpp"
#include "rig.hpp"

namespace accelmgr::test {
namespace {

using Buckets = std::vector<std::vector<std::size_t>>;

// The thin line: one parameter, one bucket.
TEST(GradientCopies, BringAGradientToTheSlab) {
  Rig rig({.counts = {7}});
  rig.begin(1);
  rig.micro_batch(5, true, true, {0});
  ASSERT_TRUE(rig.copies->finish());
  EXPECT_EQ(rig.sink.seen[0], rig.expected(0, 6));
}

TEST(GradientCopies, TravelInTheOrderOfTheFirstAttempt) {
  Rig rig({});
  rig.begin(1);
  rig.micro_batch(0, true, true, {1, 0, 3});
  ASSERT_TRUE(rig.copies->finish());
  EXPECT_EQ(rig.copies->buckets(), (Buckets{{1, 0}, {3, 2}})) << "what was not used comes last";
  rig.begin(1);
  rig.micro_batch(0, true, true, {3, 2, 1, 0});
  ASSERT_TRUE(rig.copies->finish());
  EXPECT_EQ(rig.copies->buckets(), (Buckets{{1, 0}, {3, 2}})) << "and the order stays";
  EXPECT_EQ(rig.sink.seen.size(), 4u);
}

TEST(GradientCopies, BeginWhenABucketIsCompleteInTheLastMicroBatch) {
  Rig rig({.counts = {300'000, 300'000}});
  const auto copied = [&] { return rig.fake.calls("cudaMemcpyAsync"); };
  rig.begin(1);
  const auto before = copied();
  rig.micro_batch(0, true, false, {1, 0});
  EXPECT_EQ(copied(), before) << "another micro-batch adds to the gradients";
  rig.micro_batch(0, false, true, {1});
  EXPECT_EQ(copied(), before + 1) << "the first bucket is on the way, while backward goes on";
  rig.micro_batch(0, false, true, {0});
  EXPECT_EQ(copied(), before + 2);
  ASSERT_TRUE(rig.copies->finish());
  EXPECT_EQ(copied(), before + 2);
}

TEST(GradientCopies, OfAMicroBatchThatWasNotKnownToBeTheLastAreMadeAtTheEnd) {
  Rig rig({});
  rig.begin(1);
  rig.micro_batch(1, true, false);
  ASSERT_TRUE(rig.copies->finish());
  for (std::size_t i = 0; i < rig.size(); ++i) EXPECT_EQ(rig.sink.seen[i], rig.expected(i, 2));
}

TEST(GradientCopies, IncludeWhatOnlyAnEarlierMicroBatchWrote) {
  Rig rig({});
  rig.begin(1);
  rig.micro_batch(1, true, false, {2, 0});
  rig.micro_batch(1, false, true, {0});
  ASSERT_TRUE(rig.copies->finish());
  EXPECT_EQ(rig.sink.seen[2], rig.expected(2, 2));
  EXPECT_EQ(rig.sink.seen.size(), 2u) << "and nothing of what was not written";
}

TEST(GradientCopies, WithoutASlabOfTheirDtypeAreCapturedFromStagingMemory) {
  Rig rig({.has_slab = false});
  rig.begin(1);
  rig.micro_batch(1, true, true);
  ASSERT_TRUE(rig.copies->finish());
  EXPECT_TRUE(rig.sink.seen.empty());
  for (std::size_t i = 0; i < rig.size(); ++i) EXPECT_EQ(rig.sink.captured[i], rig.expected(i, 2));
  EXPECT_EQ(rig.fake.unregistered_copies(), 0);
}

TEST(GradientCopies, AreLeftWhenNobodyWantsThem) {
  Rig rig({.execution = FakeCuda::Execution::threads});
  std::atomic<bool> released = false;
  rig.begin(1);
  rig.fake.launch(rig.compute.get(), [&] {
    while (!released) std::this_thread::yield();
  });
  rig.micro_batch(1, true, true);
  rig.sink.asked = [] { return false; };
  EXPECT_FALSE(rig.copies->finish());
  EXPECT_TRUE(rig.sink.seen.empty());
  released = true;
  rig.sink.asked = nullptr;
  rig.begin(2);
  rig.micro_batch(1, true, true);
  ASSERT_TRUE(rig.copies->finish());
  EXPECT_EQ(rig.sink.seen[0], rig.expected(0, 3)) << "the next attempt is right";
}

TEST(GradientCopies, RefuseAGradientThatChangesWhileItIsCopied) {
  Rig rig({.counts = {4}});
  rig.begin(1);
  rig.micro_batch(1, true, true, {0});
  EXPECT_EQ(message_of<ModelError>([&] { rig.copies->written(0, rig.gradients[0].get()); }),
            "the gradient of 'p0' was written after its copy had been queued");
  EXPECT_THROW(rig.copies->written(1, rig.gradients[0].get()), ModelError);
}

TEST(GradientCopies, AreTheSameBitsFromThreads) {
  Rig rig({.execution = FakeCuda::Execution::threads});
  for (int step = 0; step < 20; ++step) {
    const auto value = float(step);
    rig.begin(value);
    rig.micro_batch(1, true, false);
    rig.micro_batch(2, false, true);
    ASSERT_TRUE(rig.copies->finish());
    for (std::size_t i = 0; i < rig.size(); ++i)
      ASSERT_EQ(rig.sink.seen[i], rig.expected(i, 2 * value + 3 + float(i)));
  }
  EXPECT_EQ(rig.fake.unregistered_copies(), 0);
}

// Wherever memory ends while a runner binds its replica, nothing stays behind.
TEST(GradientCopies, GiveEverythingBackWhereverAnAllocationFails) {
  for (int nth = 1;; ++nth) {
    FakeCuda fake(FakeCuda::Execution::stepped);
    fake.fail("cudaEventCreateWithFlags", nth, device::code::out_of_memory);
    const session::Manifest manifest = [] {
      session::Manifest one;
      one.tensors.push_back({.name = "p", .aliases = {}, .shape = {4}, .count = 4});
      return one;
    }();
    NotingSink sink(manifest, true);
    bool failed = false;
    try {
      device::Device device(FakeCuda::runtime(), 0);
      const auto compute = device.make_stream();
      const device::GradientCopies copies(device, manifest, session::Element::f32, sink, compute.get(), 1);
    } catch (const device::DeviceError&) {
      failed = true;
    }
    EXPECT_EQ(fake.held(), FakeCuda::Held{}) << nth;
    if (!failed) break;
  }
}

TEST(GradientCopies, OfADeviceThatBreaksEndInItsError) {
  Rig rig({});
  rig.begin(1);
  rig.micro_batch(1, true, true);
  rig.fake.break_after(3, device::code::illegal_address);
  try {
    rig.copies->finish();
    ADD_FAILURE() << "it finished";
  } catch (const device::DeviceError& error) {
    EXPECT_EQ(error.code(), device::code::illegal_address);
  }
}

TEST(GradientCopies, OfADeviceThatHangsEndAtTheDeadline) {
  Rig rig({.execution = FakeCuda::Execution::threads, .timeout_s = 0.1});
  rig.begin(1);
  rig.fake.hang_after(2);
  rig.micro_batch(1, true, true);
  EXPECT_THROW(rig.copies->finish(), device::DeviceError);
  EXPECT_EQ(rig.fake.endless_waits(), 0);
}

}  // namespace
}  // namespace accelmgr::test
