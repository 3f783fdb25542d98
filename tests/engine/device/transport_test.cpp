// What the transport promises on every runtime, between a device and the memory of a session as a runner maps
// it. Nothing here needs a kernel: the device computes by filling and copying its memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <vector>

#include "base/unique_fd.hpp"
#include "elements.hpp"
#include "engine/device/gradient_copies.hpp"
#include "engine/device/parameter_upload.hpp"
#include "engine/session/manifest.hpp"
#include "engine/support/runner_side.hpp"
#include "float_manifest.hpp"
#include "tested_runtime.hpp"

namespace accelmgr::test {
namespace {

session::Session make_session(session::Manifest& manifest) {
  session::Extent extent{.ranks = 1, .bytes = manifest.place_tensors()};
  extent.tensors = manifest.tensors.size();
  extent.manifest_bytes = session::manifest_bytes(manifest);
  auto session = session::Session::create(extent, extent.ranks, 1);
  session.publish();
  return session;
}

/// As a runner has it: the parameters are read-only.
session::Session attach(const session::Session& session) {
  std::vector<base::UniqueFd> fds;
  for (const int fd : session.fds()) fds.push_back(base::duplicate(fd));
  return session::Session::attach(std::move(fds), 0, true);
}

/// Gradients go to the slab of a session, or are captured there if it `has_slab` not.
class SessionSink final : public RunnerSide {
 public:
  SessionSink(session::Session& session, const session::Manifest& manifest, bool has_slab)
      : session_(session), manifest_(manifest), has_slab_(has_slab) {}

  void capture(std::size_t index, const void* gradient) override {
    std::memcpy(place(index), gradient, manifest_.tensors[index].slab_bytes());
  }
  std::span<std::byte> slab() override {
    if (!has_slab_) return {};
    return {session_.slab(0), session_.header().bytes.slab};
  }
  std::byte* place_of(std::size_t index) override { return place(index); }
  bool is_trained(std::size_t index) override {
    return manifest_.tensors[index].group != session::Group::frozen || index == unfrozen;
  }
  bool last_micro_batch() override { return last; }
  bool wanted() override {
    ++asked;
    return wants;
  }
  std::span<const float> values(std::size_t index) const {
    return {reinterpret_cast<const float*>(place(index)), manifest_.tensors[index].count};
  }
  Elements elements(std::size_t index) const {
    const auto& entry = manifest_.tensors[index];
    return {place(index), entry.types.slab, entry.elements()};
  }

  bool last = true, wants = true;
  int asked = 0;
  std::optional<std::size_t> unfrozen;

 private:
  std::byte* place(std::size_t index) const { return session_.slab(0) + manifest_.tensors[index].slab; }
  session::Session& session_;
  const session::Manifest& manifest_;
  bool has_slab_;
};

/// The number whose four bytes are `value`.
float of_bytes(int value) { return std::bit_cast<float>(static_cast<std::uint32_t>(value) * 0x01010101U); }

class Transport : public testing::TestWithParam<RuntimeKind> {
 protected:
  /// Parameters of 1.2 MB, 20 bytes, 28 MB, 4 bytes and 1.2 MB: three buckets.
  Transport() : Transport(float_manifest({300'000, 5, 7'000'000, 1, 300'000})) {}
  explicit Transport(session::Manifest tensors) : manifest(std::move(tensors)) {
    for (const auto& entry : manifest.tensors) {
      places.push_back({runners.parameters() + entry.offset, {1}});
      parameters.push_back(device.allocate(entry.bytes()));
      targets.push_back(parameters.back().get());
      gradients.push_back(device.allocate(entry.bytes()));
    }
    for (auto& part : slow) part = device.allocate(runtime->slow_copy_bytes);
  }
  std::size_t size() const { return manifest.tensors.size(); }
  std::size_t bytes(std::size_t i) const { return manifest.tensors[i].bytes(); }

  /// The host writes value + i to all elements of parameter i.
  void write(float value) {
    for (std::size_t i = 0; i < size(); ++i)
      std::fill_n(reinterpret_cast<float*>(host.parameters() + manifest.tensors[i].offset),
                  manifest.tensors[i].count, value + float(i));
  }
  void expect_slab(const std::function<float(std::size_t)>& value) const {
    for (std::size_t i = 0; i < size(); ++i) {
      const auto values = sink.values(i);
      const auto other = std::ranges::find_if(values, [&](float found) { return found != value(i); });
      EXPECT_EQ(other, values.end()) << "gradient " << i << " has " << *other << " at "
                                     << other - values.begin() << " of " << values.size();
    }
  }

  /// Keeps the stream busy for about `ms`.
  void occupy(device::StreamHandle stream, int ms) {
    for (int i = 0; i < 2 * ms; ++i)
      device.copy(slow[0].get(), slow[1].get(), runtime->slow_copy_bytes, device::Direction::on_device,
                  stream);
  }
  /// Fills all gradients with bytes of `value`, each after `ms` of other work.
  void write_gradients(device::GradientCopies& copies, int value, int ms = 0) {
    for (std::size_t i = size(); i-- > 0;) {
      occupy(compute.get(), ms);
      ASSERT_EQ(runtime->calls.fill(gradients[i].get(), value, bytes(i), compute.get()),
                device::code::success);
      copies.written(i, gradients[i].get());
    }
  }
  static void begin(device::GradientCopies& copies, device::ParameterUpload* upload = nullptr) {
    EXPECT_TRUE(copies.begin_attempt());
    copies.begin_work();
    if (upload != nullptr) upload->load();
  }
  /// The gradient of each parameter is the parameter.
  void compute_gradients(device::GradientCopies& copies) {
    for (std::size_t i = size(); i-- > 0;) {
      if (!sink.is_trained(i)) continue;
      device.copy(gradients[i].get(), targets[i], bytes(i), device::Direction::on_device, compute.get());
      copies.written(i, gradients[i].get());
    }
  }
  device::GradientCopies make_copies() { return {device, sink.binding(manifest), compute.get(), 60}; }
  device::ParameterUpload make_upload() {
    return {device, sink.binding(manifest, places), targets, compute.get()};
  }

  session::Manifest manifest;
  session::Session host = make_session(manifest), runners = attach(host);
  SessionSink sink{runners, manifest, true}, capturing{runners, manifest, false};
  std::unique_ptr<TestedRuntime> runtime = GetParam().open();
  device::Device device{runtime->calls, 0};
  device::Stream compute = device.make_stream();
  std::vector<replica::Place> places;
  std::vector<device::Memory> parameters, gradients;
  std::vector<std::byte*> targets;
  std::array<device::Memory, 2> slow;
};
INSTANTIATE_TEST_SUITE_P(Runtimes, Transport, testing::ValuesIn(tested_runtimes()),
                         [](const auto& tested) { return std::string(tested.param.name); });

TEST_P(Transport, CarriesParametersFromAMappingThatIsReadOnlyAndGradientsToTheSlab) {
  auto upload = make_upload();
  auto copies = make_copies();
  for (const float value : {1.0F, 17.0F, -3.5F}) {
    write(value);
    begin(copies, &upload);
    compute_gradients(copies);
    ASSERT_TRUE(copies.finish());
    expect_slab([&](std::size_t i) { return value + float(i); });
  }
  EXPECT_EQ(copies.buckets().size(), 3u);
}

class MixedTransport : public Transport {
 protected:
  MixedTransport() : Transport(mixed_manifest({3000, 5000, 17})) {}
};
INSTANTIATE_TEST_SUITE_P(Runtimes, MixedTransport, testing::ValuesIn(tested_runtimes()),
                         [](const auto& tested) { return std::string(tested.param.name); });

// The place of the unfrozen parameter begins in the last page of the slab that is registered.
TEST_P(MixedTransport, CarriesAllDtypesAndAParameterThatIsUnfrozen) {
  auto upload = make_upload();
  auto copies = make_copies();
  for (const float value : {1.0F, 17.0F, -3.5F}) {
    for (std::size_t i = 0; i < size(); ++i)
      if (const auto& entry = manifest.tensors[i]; entry.has_room())
        Elements(host.parameters() + entry.offset, entry.types.gradient, entry.elements())
            .fill(value + float(i));
    if (value == 17) sink.unfrozen = to_unfreeze;
    begin(copies, &upload);
    compute_gradients(copies);
    ASSERT_TRUE(copies.finish());
    for (std::size_t i = 0; i < size(); ++i) {
      if (!sink.is_trained(i)) continue;
      EXPECT_EQ(sink.elements(i).numbers(),
                std::vector<double>(manifest.tensors[i].elements(), value + float(i)))
          << i;
    }
  }
}

TEST_P(Transport, CopiesAGradientAfterEverythingThatWasQueuedBefore) {
  auto copies = make_copies();
  for (int step = 1; step <= 5; ++step) {
    begin(copies);
    occupy(compute.get(), 5);
    write_gradients(copies, step);
    ASSERT_TRUE(copies.finish());
    expect_slab([&](std::size_t) { return of_bytes(step); });
  }
}

TEST_P(Transport, CopiesTheSumThatTheLastMicroBatchLeaves) {
  auto copies = make_copies();
  begin(copies);
  sink.last = false;
  write_gradients(copies, 1);
  sink.last = true;
  write_gradients(copies, 2, 1);
  ASSERT_TRUE(copies.finish());
  expect_slab([](std::size_t) { return of_bytes(2); });
}

// As a replica does that records its last micro-batch: all work is queued by one call, and each gradient says
// when it is complete. Those behind it change while it is copied.
TEST_P(Transport, CopiesGradientsWhileTheGraphThatMakesThemGoesOn) {
  auto copies = make_copies();
  std::vector<device::Event> complete;
  for (std::size_t i = 0; i < size(); ++i) complete.push_back(device.make_event());
  const auto launch = runtime->graph_of(compute.get(), [&] {
    for (std::size_t i = size(); i-- > 0;) {
      occupy(compute.get(), 2);
      device.copy(gradients[i].get(), targets[i], bytes(i), device::Direction::on_device, compute.get());
      device.record_in_graph(complete[i], compute.get());
    }
    occupy(compute.get(), 20);
  });
  auto upload = make_upload();
  for (const float value : {1.0F, 17.0F, -3.5F}) {
    write(value);
    begin(copies, &upload);
    launch();
    for (std::size_t i = size(); i-- > 0;) copies.written(i, gradients[i].get(), &complete[i]);
    ASSERT_TRUE(copies.finish());
    expect_slab([&](std::size_t i) { return value + float(i); });
  }
  EXPECT_EQ(copies.buckets().size(), 3u);
}

TEST_P(Transport, CapturesFromStagingMemoryWhereThereIsNoSlab) {
  auto upload = make_upload();
  device::GradientCopies copies(device, capturing.binding(manifest), compute.get(), 60);
  write(5);
  begin(copies, &upload);
  compute_gradients(copies);
  ASSERT_TRUE(copies.finish());
  expect_slab([](std::size_t i) { return 5 + float(i); });
}

TEST_P(Transport, LeavesAnAttemptThatIsNotWantedAndMakesTheNextOneRight) {
  auto upload = make_upload();
  auto copies = make_copies();
  write(1);
  bool finished = true;
  // If this thread was stopped until the device had done its work, it gets more.
  for (int ms = 200; finished && ms < 20'000; ms *= 2) {
    sink.wants = true;
    begin(copies, &upload);
    occupy(compute.get(), ms);
    compute_gradients(copies);
    sink.wants = false;
    finished = copies.finish();
  }
  EXPECT_FALSE(finished);
  sink.wants = true;
  // As replicas do: kernels of an attempt that was left still read the parameters, and copies the gradients.
  device.settle(compute.get(), 120);
  copies.settle();
  write(2);
  begin(copies, &upload);
  compute_gradients(copies);
  ASSERT_TRUE(copies.finish());
  expect_slab([](std::size_t i) { return 2 + float(i); });
}

TEST_P(Transport, GivesSignsOfLifeWhileTheDeviceComputes) {
  const auto done = device.make_event();
  // Time in which this process is stopped has no signs of life: a longer computation has them.
  for (int ms = 100; sink.asked < 2 && ms < 10'000; ms *= 2) {
    sink.asked = 0;
    occupy(compute.get(), ms);
    device.record(done, compute.get());
    EXPECT_TRUE(device.wait(done, sink, 60));
  }
  EXPECT_GE(sink.asked, 2);
}

TEST_P(Transport, SaysSoWhenTheMemoryOfTheDeviceEndsAndGoesOn) {
  try {
    const auto too_much = device.allocate(std::size_t{1} << 50);
    ADD_FAILURE() << "it was allocated";
  } catch (const device::DeviceError& error) {
    EXPECT_EQ(error.code(), device::code::out_of_memory);
    EXPECT_STREQ(error.what(), "cudaMalloc: cudaErrorMemoryAllocation (2): out of memory");
  }
  auto copies = make_copies();
  begin(copies);
  write_gradients(copies, 3);
  ASSERT_TRUE(copies.finish());
  expect_slab([](std::size_t) { return of_bytes(3); });
}

// In a process of its own, which has no device afterwards.
TEST_P(Transport, OfADeviceThatMeetsAnIllegalAddressEndsInItsErrorAndGivesBackWhatItCan) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto code_of_the_error = [this] {
    try {
      auto upload = make_upload();
      auto copies = make_copies();
      begin(copies);
      runtime->queue_illegal_write(compute.get());
      compute_gradients(copies);
      copies.finish();
    } catch (const device::DeviceError& error) {
      std::fprintf(stderr, "%s\n", error.what());
      return error.code();
    }
    return device::code::success;
  };
  EXPECT_EXIT(std::_Exit(code_of_the_error() == device::code::illegal_address ? 0 : 1),
              testing::ExitedWithCode(0), "cudaErrorIllegalAddress");
}

TEST_P(Transport, RegistersNoPageTwiceAndEveryPageAgain) {
  for (int time = 0; time < 3; ++time) {
    const auto registration = device.register_pages(sink.slab(), device::register_read_write);
    try {
      device.register_pages(sink.slab().first(100), device::register_read_write);
      ADD_FAILURE() << "it was registered twice";
    } catch (const device::DeviceError& error) {
      EXPECT_EQ(error.function(), "cudaHostRegister");
    }
    const auto stream = device.make_stream();  // The error is not reported again.
  }
}

}  // namespace
}  // namespace accelmgr::test
