// A device that computes with the fake: a few parameters, a master and a slab in the test's memory, and steps
// whose results the test knows.
#pragma once

#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "elements.hpp"
#include "engine/device/gradient_copies.hpp"
#include "engine/device/parameter_upload.hpp"
#include "engine/support/fake_cuda.hpp"
#include "engine/support/runner_side.hpp"
#include "float_manifest.hpp"
#include "pages.hpp"

namespace accelmgr::test {

/// A sink with a slab in memory of the test, or without one.
class SlabSink : public RunnerSide {
 public:
  SlabSink(const session::Manifest& manifest, bool has_slab, std::size_t room)
      : manifest_(manifest),
        has_slab_(has_slab),
        slab_bytes_(session::Manifest(manifest).place_tensors().slab),
        memory_(room) {}

  /// The part of the parameters that are trained from the start, as a session has it.
  std::span<std::byte> slab() override {
    return has_slab_ ? memory_.span().first(slab_bytes_) : std::span<std::byte>();
  }
  std::byte* place_of(std::size_t index) override {
    return memory_.span().data() + manifest_.tensors[index].slab;
  }
  bool is_trained(std::size_t index) override {
    return manifest_.tensors[index].group != session::Group::frozen || unfrozen.contains(index);
  }
  bool is_stale(std::size_t index) override { return !fresh.contains(index); }
  bool last_micro_batch() override { return last; }

  std::set<std::size_t> unfrozen, fresh;
  bool last = false;

 protected:
  const session::Manifest& manifest_;
  const bool has_slab_;

 private:
  std::uint64_t slab_bytes_;
  Pages memory_;
};

/// It notes each gradient as it is at the moment when it arrives.
class NotingSink final : public SlabSink {
 public:
  NotingSink(const session::Manifest& manifest, bool has_slab)
      : SlabSink(manifest, has_slab, std::size_t{16} << 20) {}

  void capture(std::size_t index, const void* gradient) override {
    const auto& entry = manifest_.tensors[index];
    std::vector<std::byte> bytes(entry.elements() * session::bytes_of(entry.types.gradient));
    std::memcpy(bytes.data(), gradient, bytes.size());
    captured[index] = Elements(bytes.data(), entry.types.gradient, entry.elements()).numbers();
  }
  void arrived(std::span<const std::size_t> indices) override {
    for (const auto index : indices) {
      const auto& entry = manifest_.tensors[index];
      seen[index] = Elements(place_of(index), entry.types.slab, entry.elements()).numbers();
    }
  }
  void built() override {
    if (when_built) when_built();
  }
  bool wanted() override { return asked == nullptr || asked(); }

  std::map<std::size_t, std::vector<double>> seen, captured;
  std::function<bool()> asked;
  std::function<void()> when_built;
};

class Rig {
 public:
  struct Options {
    FakeCuda::Execution execution = FakeCuda::Execution::stepped;
    std::uint64_t seed = 0;
    std::vector<std::uint64_t> counts = {300'000, 5, 70'000, 1};  ///< Elements of each parameter.
    bool has_slab = true;
    double timeout_s = 30;
    bool records = false;   ///< The last micro-batch is a graph.
    bool is_mixed = false;  ///< The parameters are those of mixed_manifest(). Otherwise they are float32.
    session::Precision precision = {};
  };
  explicit Rig(Options options)
      : records(options.records),
        manifest(options.is_mixed ? mixed_manifest(options.counts, options.precision)
                                  : float_manifest(options.counts)),
        sink(manifest, options.has_slab),
        fake(options.execution, options.seed) {
    std::vector<std::byte*> targets;
    for (const auto& entry : manifest.tensors) {
      places.push_back({master.span().data() + entry.offset, {1}});
      const auto bytes = entry.count * size_of(entry.runner_dtype);
      targets.push_back(parameters.emplace_back(device.allocate(bytes)).get());
      gradients.push_back(device.allocate(bytes));
      rounded.push_back(device.allocate(entry.has_room() ? entry.slab_bytes() : 1));
      complete.push_back(device.make_event());
    }
    loss = device.allocate(sizeof(float));
    upload.emplace(device, sink.binding(manifest, places), targets, compute.get());
    copies.emplace(device, sink.binding(manifest), compute.get(), options.timeout_s);
  }

  std::size_t size() const { return manifest.tensors.size(); }
  static float* floats(const device::Memory& memory) { return reinterpret_cast<float*>(memory.get()); }
  /// The elements of a parameter, or of its gradient, in memory of the host or of the device. None of a
  /// parameter that cannot be trained.
  Elements elements(std::byte* memory, std::size_t i) const {
    const auto& entry = manifest.tensors[i];
    return {memory, entry.types.gradient, entry.has_room() ? entry.elements() : 0};
  }

  /// The host writes all parameters.
  void write(float value) {
    for (std::size_t i = 0; i < size(); ++i) elements(places[i].data, i).fill(value + float(i));
  }

  void begin(float value) {
    sink.seen.clear();
    sink.captured.clear();
    write(value);
    EXPECT_TRUE(copies->begin_attempt());
    copies->begin_work();
    upload->load();
  }
  /// The gradient of parameter i is its value plus `added`; further micro-batches add to it. Each adds the
  /// first parameter's first value to the loss.
  void micro_batch(float added, bool first, bool last, const std::vector<std::size_t>& used = {3, 2, 1, 0}) {
    sink.last = last;
    const bool recorded = records && last;
    if (recorded) fake.begin_graph(compute.get());
    for (const auto i : used) {
      fake.launch(compute.get(), [this, i, added, first] {
        const auto value = elements(parameters[i].get(), i).numbers();
        elements(gradients[i].get(), i).change([&](double before, std::uint64_t e) {
          return (first ? 0 : before) + value[e] + double(added);
        });
      });
      if (copies->rounds(i))
        fake.launch(compute.get(), [this, i] {
          const auto& entry = manifest.tensors[i];
          session::best_kernels().capture_copy(rounded[i].get(), gradients[i].get(), entry.elements(),
                                               entry.types);
        });
      if (recorded) {
        device.record_in_graph(complete[i], compute.get());
      } else {
        copies->written(i, told(i));
      }
    }
    fake.launch(compute.get(),
                [this, first] { *floats(loss) = (first ? 0 : *floats(loss)) + *floats(parameters[0]); });
    if (!recorded) return;
    fake.launch(compute.get(), *fake.end_graph(compute.get()));
    for (const auto i : used) copies->written(i, told(i), &complete[i]);
  }
  const std::byte* told(std::size_t i) const { return (copies->rounds(i) ? rounded : gradients)[i].get(); }
  std::vector<double> expected(std::size_t parameter, float value) const {
    return std::vector<double>(manifest.tensors[parameter].elements(), value + float(parameter));
  }

  const bool records;
  session::Manifest manifest;
  Pages master{std::size_t{16} << 20};
  NotingSink sink;
  FakeCuda fake;  // Its threads, which copy from and to the memory above, end before that.
  device::Device device{FakeCuda::runtime(), 0};
  device::Stream compute = device.make_stream();
  std::vector<replica::Place> places;
  std::vector<device::Memory> parameters, gradients;
  std::vector<device::Memory> rounded;  ///< Gradients for slabs of bfloat16.
  std::vector<device::Event> complete;  ///< Of each gradient in a graph.
  device::Memory loss;
  std::optional<device::ParameterUpload> upload;
  std::optional<device::GradientCopies> copies;
};

}  // namespace accelmgr::test
