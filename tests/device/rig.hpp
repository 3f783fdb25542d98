// A device that computes with the fake: a few parameters, a master and a slab in the test's memory, and steps
// whose results the test knows.
#pragma once

#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "device/gradient_copies.hpp"
#include "device/parameter_upload.hpp"
#include "support/fake_cuda.hpp"

namespace accelmgr::test {

/// Whole pages.
class Pages {
 public:
  explicit Pages(std::size_t bytes)
      : bytes_((bytes + page - 1) / page * page),
        data_(static_cast<std::byte*>(std::aligned_alloc(page, bytes_))) {
    std::fill_n(data_.get(), bytes_, std::byte{0});
  }
  std::span<std::byte> span() const { return {data_.get(), bytes_}; }

 private:
  static constexpr std::size_t page = 4096;
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  std::size_t bytes_;
  std::unique_ptr<std::byte, Free> data_;
};

/// A sink with a slab, or without one. It notes each gradient as it is at the moment when it arrives.
class NotingSink final : public replica::Sink {
 public:
  NotingSink(const session::Manifest& manifest, bool has_slab) : manifest_(manifest), has_slab_(has_slab) {}

  void capture(std::size_t index, const void* gradient) override {
    const auto* values = static_cast<const float*>(gradient);
    captured[index].assign(values, values + manifest_.tensors[index].count);
  }
  std::span<std::byte> slab() override { return has_slab_ ? memory_.span() : std::span<std::byte>(); }
  std::byte* place_of(std::size_t index) override {
    return memory_.span().data() + manifest_.tensors[index].first * sizeof(float);
  }
  void arrived(std::size_t index) override {
    const auto* values = reinterpret_cast<const float*>(place_of(index));
    seen[index].assign(values, values + manifest_.tensors[index].count);
    order.push_back(index);
  }
  void backward_begins() override {}
  bool last_micro_batch() override { return last; }
  bool wanted() override { return asked == nullptr || asked(); }

  std::map<std::size_t, std::vector<float>> seen, captured;
  std::vector<std::size_t> order;
  std::function<bool()> asked;
  bool last = false;

 private:
  const session::Manifest& manifest_;
  bool has_slab_;
  Pages memory_{std::size_t{16} << 20};
};

class Rig {
 public:
  struct Options {
    FakeCuda::Execution execution = FakeCuda::Execution::stepped;
    std::uint64_t seed = 0;
    std::vector<std::uint64_t> counts = {300'000, 5, 70'000, 1};  ///< Elements of each parameter.
    bool has_slab = true;
    double timeout_s = 30;
    bool records = false;  ///< The last micro-batch is a graph.
  };
  explicit Rig(Options options)
      : records(options.records),
        manifest(manifest_of(options.counts)),
        sink(manifest, options.has_slab),
        fake(options.execution, options.seed) {
    std::vector<std::byte*> targets;
    for (const auto& entry : manifest.tensors) {
      places.push_back({master.span().data() + entry.first * sizeof(float), {1}});
      targets.push_back(parameters.emplace_back(device.allocate(entry.count * sizeof(float))).get());
      gradients.push_back(device.allocate(entry.count * sizeof(float)));
      complete.push_back(device.make_event());
    }
    loss = device.allocate(sizeof(float));
    upload.emplace(device, manifest, session::Element::f32, places, targets, compute.get());
    copies.emplace(device, manifest, session::Element::f32, sink, compute.get(), options.timeout_s);
  }

  std::size_t size() const { return manifest.tensors.size(); }
  static float* floats(const device::Memory& memory) { return reinterpret_cast<float*>(memory.get()); }

  /// The host writes all parameters.
  void write(float value) {
    for (std::size_t i = 0; i < size(); ++i)
      std::fill_n(reinterpret_cast<float*>(places[i].data), manifest.tensors[i].count, value + float(i));
  }

  void begin(float value) {
    sink.seen.clear();
    sink.captured.clear();
    sink.order.clear();
    write(value);
    copies->begin_attempt();
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
        const auto *from = floats(parameters[i]), *end = from + manifest.tensors[i].count;
        for (auto* to = floats(gradients[i]); from != end; ++from, ++to)
          *to = (first ? 0 : *to) + *from + added;
      });
      if (recorded) {
        device.record_in_graph(complete[i], compute.get());
      } else {
        copies->written(i, gradients[i].get());
      }
    }
    fake.launch(compute.get(),
                [this, first] { *floats(loss) = (first ? 0 : *floats(loss)) + *floats(parameters[0]); });
    if (!recorded) return;
    fake.launch(compute.get(), *fake.end_graph(compute.get()));
    for (const auto i : used) copies->written(i, gradients[i].get(), &complete[i]);
  }
  std::vector<float> expected(std::size_t parameter, float value) const {
    return std::vector<float>(manifest.tensors[parameter].count, value + float(parameter));
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
  std::vector<device::Event> complete;  ///< Of each gradient in a graph.
  device::Memory loss;
  std::optional<device::ParameterUpload> upload;
  std::optional<device::GradientCopies> copies;

 private:
  static session::Manifest manifest_of(const std::vector<std::uint64_t>& counts) {
    session::Manifest manifest;
    for (const auto count : counts)
      manifest.tensors.push_back({.name = "p" + std::to_string(manifest.tensors.size()),
                                  .aliases = {},
                                  .shape = {static_cast<std::int64_t>(count)},
                                  .count = count});
    manifest.place_tensors(session::Element::f32);
    return manifest;
  }
};

}  // namespace accelmgr::test
