// Binds replicas of libtorch to memory of the test, as a runner does, and makes attempts with them.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "engine/replica/model.hpp"
#include "engine/replica/replica.hpp"
#include "engine/session/strided.hpp"
#include "engine/support/runner_side.hpp"
#include "pages.hpp"

namespace accelmgr::test {

/// The gradients of an attempt. Like a runner it stores the first one of a parameter and adds further ones,
/// in the parameters' dtype. It notes what a device wrote as it is at the moment when it arrives.
class BenchSink final : public RunnerSide {
 public:
  using Gradients = std::map<std::size_t, std::vector<std::byte>>;

  void capture(std::size_t index, const void* gradient) override {
    const auto& entry = manifest->tensors.at(index);
    const auto& kernels = session::best_kernels();
    auto& sum = gradients[index];
    const bool is_first = sum.empty();
    sum.resize(entry.slab_bytes());
    is_first ? kernels.capture_copy(sum.data(), gradient, entry.elements(), entry.types)
             : kernels.capture_add(sum.data(), gradient, entry.elements(), entry.types);
  }
  std::span<std::byte> slab() override { return has_slab ? memory->span() : std::span<std::byte>(); }
  std::byte* place_of(std::size_t index) override {
    return memory->span().data() + manifest->tensors.at(index).slab;
  }
  bool is_trained(std::size_t index) override {
    return manifest->tensors.at(index).group != session::Group::frozen;
  }
  void arrived(std::span<const std::size_t> indices) override {
    for (const auto index : indices) {
      const auto bytes = manifest->tensors.at(index).slab_bytes();
      gradients[index].assign(place_of(index), place_of(index) + bytes);
      ++arrivals;
    }
  }
  void magnitude(std::size_t index, double largest) override {
    if (!std::isfinite(largest)) not_finite.insert(index);
  }
  void backward_begins() override { ++backwards; }
  bool last_micro_batch() override { return last; }
  bool wanted() override { return asked == nullptr || asked(); }

  const session::Manifest* manifest = nullptr;
  std::unique_ptr<Pages> memory;
  bool has_slab = true, last = false;
  int backwards = 0, arrivals = 0;
  std::set<std::size_t> not_finite;
  Gradients gradients;
  std::function<bool()> asked;
};

/// A micro-batch in memory of the test.
struct BenchBatch {
  std::vector<replica::Field> fields;
  std::vector<std::vector<std::byte>> memory;

  template <class T>
  void add(const char* name, DType dtype, std::vector<std::int64_t> shape, const std::vector<T>& values) {
    const auto* bytes = reinterpret_cast<const std::byte*>(values.data());
    memory.emplace_back(bytes, bytes + values.size() * sizeof(T));
    fields.push_back({name, dtype, std::move(shape), memory.back().data()});
  }
};

class ReplicaBench {
 public:
  /// All that an attempt and the save() after it gave.
  struct Result {
    double loss = 0;
    std::vector<std::pair<std::string, double>> scalars;
    BenchSink::Gradients gradients;
    std::vector<std::byte> state;
    bool operator==(const Result&) const = default;
  };

  explicit ReplicaBench(std::unique_ptr<replica::Replica> made, bool has_slab = true,
                        const session::Precision& precision = {})
      : replica(std::move(made)) {
    auto tensors = replica::tensors_of(replica->describe());
    manifest = std::move(tensors.manifest);
    sink.manifest = &manifest;
    sink.has_slab = has_slab;
    manifest.set_precision(precision);
    const auto bytes = manifest.place_tensors();
    sink.memory = std::make_unique<Pages>(bytes.slab_room);
    master = std::make_unique<Pages>(bytes.parameters);
    state.resize(manifest.place_buffers() + session::generator_bytes);
    places = replica::places_of(master->span().data(), manifest);
    for (std::size_t i = 0; i < places.size(); ++i)
      if (const auto& from = tensors.parameters[i]; manifest.tensors[i].shares < 0)
        session::copy_strided(places[i].data, places[i].strides, from.data, from.strides, from.shape,
                              size_of(from.dtype));
    replica->bind(sink.binding(manifest, places));
    replica->seed(7);
    save();
  }

  std::span<std::byte> generator() { return std::span(state).last(session::generator_bytes); }
  void save() { replica->save({state.data(), generator()}); }
  void load() { replica->load({state.data(), generator()}); }

  /// The first micro-batches of an attempt.
  void begin(std::span<const BenchBatch> batches, bool announce_last = true) {
    sink.gradients.clear();
    replica->begin_attempt();
    replica->load_parameters();
    for (std::size_t i = 0; i < batches.size(); ++i) {
      sink.last = announce_last && i + 1 == batches.size();
      auto slot = batches[i];
      for (std::size_t f = 0; f < slot.fields.size(); ++f) slot.fields[f].data = slot.memory[f].data();
      replica->run(slot.fields, double(batches.size()));
      for (auto& memory : slot.memory)  // The queue uses the slot again.
        std::memset(memory.data(), 0, memory.size());
    }
  }
  /// A whole attempt that is committed.
  Result attempt(std::span<const BenchBatch> batches, bool announce_last = true) {
    begin(batches, announce_last);
    auto totals = replica->collect();
    save();
    return {totals.loss, std::move(totals.scalars), sink.gradients, state};
  }
  /// The host changes all parameters of float32 and float64.
  void write_parameters(double factor) {
    const auto scale = [factor](auto* begin, std::size_t count) {
      for (std::size_t i = 0; i < count; ++i)
        begin[i] = static_cast<std::remove_reference_t<decltype(*begin)>>(begin[i] * factor);
    };
    for (std::size_t i = 0; i < places.size(); ++i) {
      if (manifest.tensors[i].shares >= 0) continue;
      const auto& entry = manifest.tensors[i];
      if (entry.dtype == DType::float64) scale(reinterpret_cast<double*>(places[i].data), entry.count);
      if (entry.dtype == DType::float32) scale(reinterpret_cast<float*>(places[i].data), entry.count);
    }
  }

  session::Manifest manifest;
  BenchSink sink;
  std::unique_ptr<Pages> master;
  std::vector<replica::Place> places;
  std::vector<std::byte> state;
  std::unique_ptr<replica::Replica> replica;  ///< Destroyed first, because it uses all members above.
};

}  // namespace accelmgr::test
