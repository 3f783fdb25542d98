#include "accelmgr/evaluator.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include "accelmgr/batch_source.hpp"
#include "accelmgr/model.hpp"
#include "model/autocast.hpp"
#include "model/checked_loss.hpp"
#include "tensor/master.hpp"

namespace accelmgr {

struct Evaluator::State {
  explicit State(Manager& m) : manager(m) {}
  std::uint64_t fill(BatchSource& source);
  Batch batch(std::uint64_t elements) const;

  Manager& manager;
  std::unique_ptr<BatchSource> source;
  std::unique_ptr<Model> model;
  std::vector<NamedTensor> buffers;
  std::vector<NamedTensor> fields;  ///< A full batch of each field.
  std::int64_t batch_size = 0;
};

Evaluator::Evaluator(Manager& manager) : state_(std::make_unique<State>(manager)) {
  const auto& config = manager.config();
  state_->source = make_data(config);
  if (!state_->source->held_out())
    throw ConfigError(
        fmt::format(
            "train.evaluate_every is {}, but the data source '{}' holds nothing out; set data.held_out",
            config.train.evaluate_every, config.data.kind),
        "train.evaluate_every");
  state_->model = make_model(config);
  state_->model->train(false);
  const auto tensors = tensor::describe(state_->model->parameters(), state_->model->buffers());
  const auto& masters = manager.parameters();
  for (std::size_t i = 0; i < masters.size(); ++i)
    tensors.parameters.at(i).tensor.set_data(masters[i].tensor.detach());
  state_->buffers = tensors.buffers;
  state_->batch_size = std::int64_t{config.batch_size_per_device} * config.nprocs;
  for (const auto& field : state_->source->fields()) {
    std::vector<std::int64_t> shape{state_->batch_size};
    shape.insert(shape.end(), field.shape.begin(), field.shape.end());
    state_->fields.push_back({field.name, at::empty(shape, at::TensorOptions().dtype(field.dtype))});
  }
}

Evaluator::~Evaluator() = default;

std::uint64_t Evaluator::State::fill(BatchSource& source_) {
  std::int64_t elements = 0;
  for (; elements < batch_size; ++elements) {
    std::vector<std::span<std::byte>> rows;
    for (std::size_t f = 0; f < fields.size(); ++f) {
      const auto bytes = source->fields()[f].bytes();
      rows.emplace_back(static_cast<std::byte*>(fields[f].tensor.mutable_data_ptr()) +
                            static_cast<std::size_t>(elements) * bytes,
                        bytes);
    }
    ElementWriter element(source->fields(), std::move(rows));
    if (!source_.next(element)) break;
  }
  return static_cast<std::uint64_t>(elements);
}

Batch Evaluator::State::batch(std::uint64_t elements) const {
  std::vector<NamedTensor> out;
  for (const auto& [name, tensor] : fields)
    out.push_back({name, tensor.narrow(0, 0, static_cast<std::int64_t>(elements))});
  return Batch(std::move(out));
}

double Evaluator::loss() {
  const at::NoGradGuard no_grad;
  const auto latest = state_->manager.buffers();
  for (std::size_t i = 0; i < latest.size(); ++i) state_->buffers[i].tensor.copy_(latest[i].tensor);
  const auto held_out = state_->source->held_out();
  double sum = 0;
  std::uint64_t elements = 0;
  while (const auto count = state_->fill(*held_out)) {
    const model::AutocastScope autocast(state_->manager.config().runners.autocast == Autocast::bf16);
    sum +=
        model::checked_loss(state_->model->forward(state_->batch(count))).item().toDouble() * double(count);
    elements += count;
  }
  if (elements == 0) throw DataError("the held-out data has no elements");
  return sum / double(elements);
}

}  // namespace accelmgr
