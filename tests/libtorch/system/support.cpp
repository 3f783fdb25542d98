#include "support.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <set>

namespace accelmgr::test {
namespace {

constexpr std::int64_t inputs = 4;
constexpr std::int64_t classes = 3;

/// A tensor of [elements, 4]; all values differ.
at::Tensor numbers(std::int64_t elements, at::ScalarType dtype) {
  return at::sin(at::arange(elements * inputs, at::kDouble).mul(1.7)).view({elements, inputs}).to(dtype);
}

std::int64_t elements_of(const Config& config) {
  return config.data.elements > 0 ? config.data.elements : 64;
}

const RegisteredData vectors("vectors", [](const Config& config) {
  const auto elements = elements_of(config);
  return tensor_source({{"input", numbers(elements, at::kFloat)},
                        {"target", at::arange(elements, at::kLong).mul(7).remainder(classes)}},
                       config.data.epochs, 0);
});

const RegisteredData numbered("numbered", [](const Config& config) {
  const auto elements = elements_of(config);
  return tensor_source(
      {{"number", at::arange(elements, at::kLong)}, {"input", numbers(elements, at::kDouble)}},
      config.data.epochs, 0);
});

/// The parameters of a model, each tied one once.
std::vector<at::Tensor> distinct_parameters(Model& model) {
  std::vector<at::Tensor> out;
  std::set<const void*> seen;
  for (const auto& [name, tensor] : model.parameters())
    if (seen.insert(tensor.unsafeGetTensorImpl()).second) out.push_back(tensor);
  return out;
}

at::Tensor taken_gradient(const at::Tensor& parameter) {
  const auto gradient = parameter.grad();
  parameter.mutable_grad().reset();
  if (!gradient.defined()) return at::zeros_like(parameter.detach());
  return gradient.is_sparse() ? gradient.to_dense() : gradient;
}

}  // namespace

Config small_config(const std::string& model_kind) {
  Config config;
  config.batch_size_per_device = 3;
  config.start_timeout = 120;
  config.step_timeout = 100;
  config.runners.threads = 1;
  config.model.kind = model_kind;
  config.model.mlp = {.input_size = 6, .hidden_size = 8, .hidden_layers = 2, .output_size = 4};
  config.model.convnet = {.image_size = 8, .input_channels = 3, .channels = 4, .classes = 4};
  config.model.gpt = {.layers = 2, .width = 16, .heads = 4, .context = 8, .vocabulary = 32, .dropout = 0.0};
  config.data.sequence_length = 8;
  return config;
}

std::optional<std::vector<NamedTensor>> next_element(BatchSource& source) {
  std::vector<NamedTensor> fields;
  std::vector<std::span<std::byte>> rows;
  for (const auto& field : source.fields()) {
    auto shape = field.shape;
    shape.insert(shape.begin(), 1);
    fields.push_back({field.name, at::empty(shape, at::ScalarType(field.dtype))});
    rows.emplace_back(static_cast<std::byte*>(fields.back().tensor.mutable_data_ptr()), field.bytes());
  }
  ElementWriter writer(source.fields(), std::move(rows));
  if (!source.next(writer)) return std::nullopt;
  return fields;
}

struct Reference::State {
  /// The next micro-batches, by rank and number.
  using MicroBatches = std::map<std::pair<std::size_t, std::size_t>, std::vector<NamedTensor>>;
  MicroBatches next_micro_batches() const;

  Config config;
  std::unique_ptr<BatchSource> source;
  std::vector<std::unique_ptr<Model>> replicas;
};

Reference::State::MicroBatches Reference::State::next_micro_batches() const {
  const auto ranks = replicas.size();
  const auto batch_size = static_cast<std::size_t>(config.batch_size_per_device);
  const auto count = ranks * batch_size * static_cast<std::size_t>(config.grad_accumulation_steps);
  MicroBatches out;
  for (std::size_t element = 0; element < count; ++element) {
    const auto fields = next_element(*source);
    if (!fields) break;
    auto& batch = out[{element % ranks, element / ranks / batch_size}];
    if (batch.empty()) {
      batch = *fields;
      continue;
    }
    for (std::size_t f = 0; f < batch.size(); ++f)
      batch[f].tensor = at::cat({batch[f].tensor, (*fields)[f].tensor});
  }
  return out;
}

Reference::Reference(const Config& config) : state_(std::make_unique<State>()) {
  state_->config = config;
  state_->source = make_data(config);
  for (int rank = 0; rank < config.nprocs; ++rank) {
    state_->replicas.push_back(make_model(config));
    state_->replicas.back()->train(true);
  }
}

Reference::~Reference() = default;

Reference::Step Reference::step(const std::vector<at::Tensor>& parameters) {
  for (const auto& replica : state_->replicas) {
    const auto own = distinct_parameters(*replica);
    EXPECT_EQ(own.size(), parameters.size());
    for (std::size_t i = 0; i < own.size(); ++i) own[i].detach().copy_(parameters[i]);
  }
  const auto batches = state_->next_micro_batches();
  const bool by_samples = state_->config.loss_scaling == LossScaling::samples;
  const auto elements = [](const std::vector<NamedTensor>& fields) { return fields.front().tensor.size(0); };
  Step out;
  for (const auto& [place, fields] : batches) out.samples += static_cast<std::uint64_t>(elements(fields));
  for (const auto& [place, fields] : batches) {
    const double share =
        by_samples ? double(elements(fields)) / double(out.samples) : 1 / double(batches.size());
    const auto outputs = state_->replicas[place.first]->forward(Batch(fields));
    outputs.loss.mul(share).backward();
    out.loss += outputs.loss.item().toDouble() * share;
    for (const auto& [name, value] : outputs.scalars) out.scalars[name] += value * share;
  }
  for (const auto& replica : state_->replicas) {
    const auto own = distinct_parameters(*replica);
    for (std::size_t i = 0; i < own.size(); ++i) {
      const auto gradient = taken_gradient(own[i]);
      if (out.gradients.size() == i) {
        out.gradients.push_back(gradient);
      } else {
        out.gradients[i].add_(gradient);
      }
    }
  }
  return out;
}

std::vector<NamedTensor> Reference::buffers(int rank) const {
  return state_->replicas.at(static_cast<std::size_t>(rank))->buffers();
}

std::vector<at::Tensor> copies(const std::vector<NamedTensor>& tensors) {
  std::vector<at::Tensor> out;
  for (const auto& [name, tensor] : tensors) out.push_back(tensor.detach().clone());
  return out;
}

std::vector<const void*> addresses(const std::vector<NamedTensor>& tensors) {
  std::vector<const void*> out;
  for (const auto& [name, tensor] : tensors) out.push_back(tensor.const_data_ptr());
  return out;
}

double distance(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  EXPECT_EQ(actual.size(), expected.size());
  double farthest = 0;
  for (std::size_t i = 0; i < std::min(actual.size(), expected.size()); ++i) {
    const auto wanted = expected[i].detach().to(at::kDouble);
    const double apart = actual[i].detach().to(at::kDouble).sub(wanted).norm().item().toDouble();
    if (apart == 0) continue;
    const double norm = wanted.norm().item().toDouble();
    if (!(apart < std::numeric_limits<double>::infinity()) || norm == 0)
      return std::numeric_limits<double>::infinity();
    farthest = std::max(farthest, apart / norm);
  }
  return farthest;
}

bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::ranges::equal(a, b, [](const at::Tensor& x, const at::Tensor& y) {
    return x.scalar_type() == y.scalar_type() && x.sizes() == y.sizes() &&
           std::memcmp(x.contiguous().const_data_ptr(), y.contiguous().const_data_ptr(), x.nbytes()) == 0;
  });
}

}  // namespace accelmgr::test
