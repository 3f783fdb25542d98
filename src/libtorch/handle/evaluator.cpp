#include "accelmgr/evaluator.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include "accelmgr/batch_source.hpp"
#include "accelmgr/model.hpp"
#include "base/exception_text.hpp"
#include "libtorch/model/autocast.hpp"
#include "libtorch/model/checked_forward.hpp"
#include "libtorch/model/checked_loss.hpp"
#include "libtorch/tensor/convert.hpp"

namespace accelmgr {
namespace {

// Prefixes of errors in user code. They say "evaluation", because no step is involved.
std::string model_name(const Config& config) {
  return fmt::format("model '{}', in the evaluation", config.model.kind);
}
std::string source_name(const Config& config) {
  return fmt::format("data source '{}', in the evaluation", config.data.kind);
}

}  // namespace

struct Evaluator::State {
  explicit State(Manager& m) : manager(m) {}
  std::unique_ptr<BatchSource> held_out();
  std::uint64_t fill(BatchSource& source);
  Batch batch(std::uint64_t elements) const;
  double loss_of(const Batch& batch);

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
  if (!state_->held_out())
    throw ConfigError(
        fmt::format(
            "train.evaluate_every is {}, but the data source '{}' has no held-out data; set data.held_out",
            config.train.evaluate_every, config.data.kind),
        "train.evaluate_every");
  state_->model = make_model(config);
  const auto parameters = base::in_user_code<ModelError>(model_name(config), [&] {
    state_->model->train(false);
    state_->buffers = tensor::without_repetitions(state_->model->buffers());
    return tensor::without_repetitions(state_->model->parameters());
  });
  const auto& masters = manager.parameters();
  for (std::size_t i = 0; i < masters.size(); ++i)
    parameters.at(i).tensor.set_data(masters[i].tensor.detach());
  state_->batch_size = std::int64_t{config.batch_size_per_device} * config.nprocs;
  for (const auto& field : state_->source->fields()) {
    std::vector<std::int64_t> shape{state_->batch_size};
    shape.insert(shape.end(), field.shape.begin(), field.shape.end());
    state_->fields.push_back(
        {field.name, at::empty(shape, at::TensorOptions().dtype(static_cast<at::ScalarType>(field.dtype)))});
  }
}

Evaluator::~Evaluator() = default;

std::unique_ptr<BatchSource> Evaluator::State::held_out() {
  return base::in_user_code<DataError>(source_name(manager.config()), [&] { return source->held_out(); });
}

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

double Evaluator::State::loss_of(const Batch& batch) {
  const auto& config = manager.config();
  const model::AutocastScope autocast(config.runners.autocast);
  try {
    return model::checked_loss(model::checked_forward(*model, batch)).item().toDouble();
  } catch (...) {
    throw ModelError(fmt::format("{}: {}", model_name(config), base::current_exception_text()));
  }
}

double Evaluator::loss() {
  const at::NoGradGuard no_grad;
  const auto latest = state_->manager.buffers();
  for (std::size_t i = 0; i < latest.size(); ++i) state_->buffers[i].tensor.copy_(latest[i].tensor);
  const auto held_out = state_->held_out();
  double sum = 0;
  std::uint64_t elements = 0;
  const auto source = source_name(state_->manager.config());
  while (const auto count = base::in_user_code<DataError>(source, [&] { return state_->fill(*held_out); })) {
    sum += state_->loss_of(state_->batch(count)) * double(count);
    elements += count;
  }
  if (elements == 0) throw DataError("the held-out data has no elements");
  return sum / double(elements);
}

}  // namespace accelmgr
