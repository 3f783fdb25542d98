#include "engine/device/gradient_copies.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "accelmgr/errors.hpp"
#include "message_of.hpp"
#include "rig.hpp"

namespace accelmgr::test {
namespace {

using Buckets = std::vector<std::vector<std::size_t>>;

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

// In a sandbox, for instance, or where a process may lock little memory.
TEST(GradientCopies, ToASlabThatCannotBeRegisteredGoThroughMemoryOfTheDriver) {
  Rig rig({});
  rig.copies.reset();
  rig.fake.fail("cudaHostRegister", 1, device::code::invalid_value);
  rig.copies.emplace(rig.device, rig.sink.binding(rig.manifest), rig.compute.get(), 30);
  for (const float value : {1.0F, 4.0F}) {
    rig.begin(value);
    rig.micro_batch(1, true, true);
    ASSERT_TRUE(rig.copies->finish());
    for (std::size_t i = 0; i < rig.size(); ++i) EXPECT_EQ(rig.sink.captured[i], rig.expected(i, value + 1));
  }
  EXPECT_EQ(rig.fake.unregistered_copies(), 0);
}

const std::vector<std::size_t> mixed_and_trained{9, 7, 6, 5, 4, 2, 0};

/// Two micro-batches, whose gradients must be in `found` afterwards.
void expect_sums(Rig& rig, float value, const std::map<std::size_t, std::vector<double>>& found) {
  rig.begin(value);
  rig.micro_batch(1, true, false, mixed_and_trained);
  rig.micro_batch(2, false, true, mixed_and_trained);
  ASSERT_TRUE(rig.copies->finish());
  EXPECT_EQ(found.size(), mixed_and_trained.size());
  for (const auto i : mixed_and_trained)
    EXPECT_EQ(found.at(i), rig.expected(i, 2 * value + 3 + float(i))) << i;
}

TEST(GradientCopies, OfAllDtypesComeToTheirPlaces) {
  for (const bool has_slab : {true, false}) {
    Rig rig({.counts = {3000, 17, 400}, .has_slab = has_slab, .is_mixed = true});
    for (const float value : {1.0F, 7.0F})
      expect_sums(rig, value, has_slab ? rig.sink.seen : rig.sink.captured);
    EXPECT_EQ(rig.fake.unregistered_copies(), 0);
  }
}

// Half of the bytes of float32 are copied, and the host rounds nothing.
TEST(GradientCopies, ForSlabsOfBfloat16AreRoundedOnTheDevice) {
  for (const bool records : {false, true}) {
    Rig rig(
        {.counts = {3000, 17, 400}, .records = records, .is_mixed = true, .precision = {.bf16_slabs = true}});
    ASSERT_TRUE(rig.copies->rounds(0));
    std::uint64_t bytes = 0;
    for (const auto i : mixed_and_trained) bytes += rig.manifest.tensors[i].slab_bytes();
    for (const float value : {1.0F, 7.0F}) {
      const auto before = rig.fake.copied(device::Direction::to_host);
      expect_sums(rig, value, rig.sink.seen);
      EXPECT_EQ(rig.fake.copied(device::Direction::to_host) - before, bytes);
    }
  }
}

// A runner in bfloat16 gives bfloat16 gradients of float32 parameters.
TEST(GradientCopies, HaveTheDtypeThatParametersHaveInRunners) {
  Rig rig(
      {.counts = {3000, 17, 400}, .has_slab = false, .is_mixed = true, .precision = {.bf16_runners = true}});
  rig.begin(1);
  rig.micro_batch(1, true, true, mixed_and_trained);
  ASSERT_TRUE(rig.copies->finish());
  EXPECT_EQ(rig.manifest.tensors[0].types.gradient, session::Element::bf16);
  for (const auto i : mixed_and_trained) EXPECT_EQ(rig.sink.captured[i], rig.expected(i, 2)) << i;
}

// The gradient of a parameter that is unfrozen may begin in the last page of the registered slab.
TEST(GradientCopies, OfAParameterThatIsUnfrozenAreStaged) {
  for (const auto& [has_slab, is_narrow] : {std::pair{true, false}, {false, false}, {true, true}}) {
    Rig rig({.counts = {3000, 5000, 17},
             .has_slab = has_slab,
             .is_mixed = true,
             .precision = {.bf16_slabs = is_narrow}});
    rig.begin(1);
    rig.micro_batch(1, true, true, mixed_and_trained);
    for (const std::size_t frozen : {to_unfreeze, std::size_t{3}})
      EXPECT_EQ(message_of<ModelError>([&] { rig.copies->written(frozen, rig.gradients[frozen].get()); }),
                "a gradient of 'p" + std::to_string(frozen) + "' was passed, but the parameter is frozen");
    ASSERT_TRUE(rig.copies->finish());

    rig.begin(1);  // An attempt that is left while its copies are under way.
    rig.micro_batch(1, true, true, mixed_and_trained);
    rig.sink.asked = [] { return false; };
    rig.fake.hang_after(0);
    EXPECT_FALSE(rig.copies->finish());
    rig.fake.go_on();
    rig.sink.asked = nullptr;
    rig.sink.unfrozen.insert(to_unfreeze);
    auto used = mixed_and_trained;
    used.push_back(to_unfreeze);
    std::rotate(used.begin() + 2, used.end() - 1, used.end());
    for (const float value : {2.0F, 9.0F}) {
      rig.begin(value);
      rig.micro_batch(1, true, true, used);
      ASSERT_TRUE(rig.copies->finish());
      EXPECT_EQ(rig.sink.captured.size(), used.size());
      for (const auto i : used) EXPECT_EQ(rig.sink.captured[i], rig.expected(i, value + 1)) << i;
    }
    EXPECT_EQ(rig.fake.unregistered_copies(), 0);
    EXPECT_EQ(rig.fake.early_unregistrations(), 0);
  }
}

TEST(GradientCopies, OfAnAttemptThatWasLeftAreAwaitedAsLongAsItMayTake) {
  Rig rig({.timeout_s = 0.2});
  rig.begin(1);
  rig.micro_batch(1, true, true);
  rig.fake.hang_after(0);
  rig.sink.asked = [] { return false; };
  EXPECT_FALSE(rig.copies->begin_attempt()) << "this attempt is over, too";
  rig.fake.go_on();
  rig.sink.asked = nullptr;
  EXPECT_TRUE(rig.copies->begin_attempt());
  EXPECT_TRUE(rig.fake.has_settled());
  rig.begin(2);
  rig.micro_batch(1, true, true);
  rig.fake.hang_after(0);
  EXPECT_EQ(message_of<device::DeviceError>([&] { EXPECT_FALSE(rig.copies->begin_attempt()); }),
            "cudaEventQuery: the device hangs: it has not ended within 0.2 s the work of an earlier attempt");
  EXPECT_EQ(rig.fake.endless_waits(), 0);
}

TEST(GradientCopies, RefuseAGradientThatChangesWhileItIsCopied) {
  Rig rig({.counts = {4}});
  rig.begin(1);
  rig.micro_batch(1, true, true, {0});
  EXPECT_EQ(message_of<ModelError>([&] { rig.copies->written(0, rig.gradients[0].get()); }),
            "the gradient of 'p0' was written after its copy had been queued");
  EXPECT_THROW(rig.copies->written(1, rig.gradients[0].get()), ModelError);
}

// Wherever memory ends while a runner binds its replica, nothing stays behind.
TEST(GradientCopies, GiveEverythingBackWhereverAnAllocationFails) {
  for (int nth = 1;; ++nth) {
    FakeCuda fake(FakeCuda::Execution::stepped);
    fake.fail("cudaEventCreateWithFlags", nth, device::code::out_of_memory);
    const auto manifest = float_manifest({4});
    NotingSink sink(manifest, true);
    bool failed = false;
    try {
      device::Device device(FakeCuda::runtime(), 0);
      const auto compute = device.make_stream();
      const device::GradientCopies copies(device, sink.binding(manifest), compute.get(), 1);
    } catch (const device::DeviceError&) {
      failed = true;
    }
    EXPECT_EQ(fake.held(), FakeCuda::Held{}) << nth;
    if (!failed) break;
  }
}

}  // namespace
}  // namespace accelmgr::test
