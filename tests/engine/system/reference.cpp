#include "reference.hpp"

#include <cstring>

#include "base/ipc/pages.hpp"
#include "engine/replica/model.hpp"
#include "engine/session/layout.hpp"
#include "engine/session/strided.hpp"
#include "engine/support/runner_side.hpp"

namespace accelmgr::test {

struct Reference::MicroBatch {
  std::size_t rank;
  std::vector<std::vector<std::byte>> rows{};  ///< Memory of each field.
  std::int64_t elements = 0;
};

/// A replica on memory of the test, as a runner binds one to a session. It adds up the gradients that it is
/// handed.
struct Reference::Bound final : RunnerSide {
  Bound(std::unique_ptr<replica::Replica> of, std::uint64_t seed)
      : generator(session::generator_bytes), model(std::move(of)) {
    auto tensors = replica::tensors_of(model->describe());
    manifest = std::move(tensors.manifest);
    buffers.resize(manifest.place_buffers());
    dtype = tensors.parameters.at(0).dtype;
    for (std::size_t i = 0; i < tensors.parameters.size(); ++i) {
      const auto& entry = manifest.tensors[i];
      const auto& from = tensors.parameters[i];
      if (entry.shares >= 0) {
        auto* first = places.at(static_cast<std::size_t>(entry.shares)).data;
        places.push_back({first + entry.shared_offset * size_of(dtype), entry.strides});
        continue;
      }
      places.push_back({pages(entry.count * size_of(dtype)), entry.value_strides()});
      session::copy_strided(places.back().data, places.back().strides, from.data, from.strides, from.shape,
                            size_of(dtype));
    }
    model->bind(binding(manifest, places));
    model->seed(seed);
    save();
  }

  void capture(std::size_t index, const void* gradient) override {
    auto& sum = sums[index];
    sum.resize(manifest.tensors.at(index).count);
    for (std::size_t i = 0; i < sum.size(); ++i)
      sum[i] += dtype == DType::float64 ? static_cast<const double*>(gradient)[i]
                                        : double(static_cast<const float*>(gradient)[i]);
  }

  void save() { model->save({buffers.data(), generator}); }

  /// Whole pages, as the master has them: a device registers pages, and no page twice.
  std::byte* pages(std::size_t bytes) {
    constexpr auto page = std::uintptr_t{ipc::largest_page_bytes};
    memory.emplace_back(session::align_up(bytes, page) + page);
    auto* begin = memory.back().data();
    return begin + (page - reinterpret_cast<std::uintptr_t>(begin) % page) % page;
  }

  std::vector<std::vector<std::byte>> memory{};
  std::vector<std::byte> buffers{}, generator;
  session::Manifest manifest{};
  DType dtype = DType::float32;
  std::vector<replica::Place> places{};  ///< Where the values of each parameter lie.
  std::map<std::size_t, std::vector<double>> sums{};
  std::unique_ptr<replica::Replica> model;  ///< Destroyed first, because it uses all members above.
};

Reference::Reference(const Config& config) : config_(config), source_(make_data(config)) {
  for (int rank = 0; rank < config.nprocs; ++rank)
    replicas_.push_back(std::make_unique<Bound>(replica::make_replica(config, replica::Role::runner(rank)),
                                                config.seed_base + static_cast<std::uint64_t>(rank)));
}

Reference::~Reference() = default;

bool Reference::read_element(MicroBatch& into) {
  const auto fields = source_->fields();
  into.rows.resize(fields.size());
  std::vector<std::span<std::byte>> rows;
  for (std::size_t f = 0; f < fields.size(); ++f) {
    into.rows[f].resize(static_cast<std::size_t>(into.elements + 1) * fields[f].bytes());
    rows.push_back(std::span(into.rows[f]).last(fields[f].bytes()));
  }
  ElementWriter writer(fields, std::move(rows));
  if (!source_->next(writer)) return false;
  ++into.elements;
  return true;
}

std::vector<Reference::MicroBatch> Reference::next_micro_batches() {
  const auto ranks = static_cast<std::size_t>(config_.nprocs);
  const auto accumulation = static_cast<std::size_t>(config_.grad_accumulation_steps);
  const auto batch_size = static_cast<std::size_t>(config_.batch_size_per_device);
  std::vector<MicroBatch> out;
  for (std::size_t rank = 0; rank < ranks; ++rank)
    for (std::size_t i = 0; i < accumulation; ++i) out.push_back({.rank = rank});
  for (std::size_t element = 0; element < ranks * accumulation * batch_size; ++element) {
    const auto rank = element % ranks, of_rank = element / ranks;
    if (!read_element(out[rank * accumulation + of_rank / batch_size])) break;
  }
  std::erase_if(out, [](const MicroBatch& batch) { return batch.elements == 0; });
  return out;
}

Reference::Step Reference::step(const Tensors& parameters) {
  for (const auto& bound : replicas_) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto& from = parameters[i];
      const auto& to = bound->places[i];
      session::copy_strided(to.data, to.strides, from.bytes.data(), session::dense_strides(from.shape),
                            from.shape, size_of(from.dtype));
    }
    bound->sums.clear();
    bound->model->begin_attempt();
    bound->model->load_parameters();
  }
  const auto batches = next_micro_batches();
  const bool by_samples = config_.loss_scaling == LossScaling::samples;
  const auto weight = [&](const MicroBatch& batch) { return by_samples ? double(batch.elements) : 1.0; };
  double weights = 0;
  for (const auto& batch : batches) weights += weight(batch);
  if (config_.loss_scaling == LossScaling::sum) weights = 1;

  Step out;
  for (const auto& batch : batches) {
    std::vector<replica::Field> fields;
    for (std::size_t f = 0; f < batch.rows.size(); ++f) {
      const auto& field = source_->fields()[f];
      auto shape = field.shape;
      shape.insert(shape.begin(), batch.elements);
      fields.push_back({field.name, field.dtype, std::move(shape), batch.rows[f].data()});
    }
    replicas_[batch.rank]->model->run(fields, weights / weight(batch));
    out.samples += static_cast<std::uint64_t>(batch.elements);
  }
  for (std::size_t i = 0; i < parameters.size(); ++i)
    out.gradients.push_back({parameters[i].name, DType::float64, parameters[i].shape,
                             std::vector<std::byte>(parameters[i].count() * sizeof(double))});
  for (const auto& bound : replicas_) {
    const auto totals = bound->model->collect();
    out.loss += totals.loss;
    for (const auto& [name, value] : totals.scalars) out.scalars[name] += value;
    for (const auto& [index, sum] : bound->sums) {
      auto* gradient = reinterpret_cast<double*>(out.gradients[index].bytes.data());
      for (std::size_t i = 0; i < sum.size(); ++i) gradient[i] += sum[i];
    }
    bound->save();
  }
  return out;
}

std::vector<std::byte> Reference::buffers(int rank) {
  return replicas_.at(static_cast<std::size_t>(rank))->buffers;
}

}  // namespace accelmgr::test
