#include "support.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
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

struct Reference::State {
  struct MicroBatch {
    std::size_t rank;
    std::vector<NamedTensor> fields;
    std::int64_t elements = 0;
  };

  std::vector<MicroBatch> next_micro_batches();
  MicroBatch empty_micro_batch(std::size_t rank) const;
  bool read_element(MicroBatch& into);

  Config config;
  std::unique_ptr<BatchSource> source;
  std::vector<std::unique_ptr<Model>> replicas;
};

Reference::State::MicroBatch Reference::State::empty_micro_batch(std::size_t rank) const {
  MicroBatch out{.rank = rank, .fields = {}};
  for (const auto& field : source->fields()) {
    std::vector<std::int64_t> shape{config.batch_size_per_device};
    shape.insert(shape.end(), field.shape.begin(), field.shape.end());
    out.fields.push_back({field.name, at::empty(shape, at::ScalarType(field.dtype))});
  }
  return out;
}

bool Reference::State::read_element(MicroBatch& into) {
  std::vector<std::span<std::byte>> rows;
  for (std::size_t f = 0; f < into.fields.size(); ++f) {
    const auto bytes = source->fields()[f].bytes();
    auto* data = static_cast<std::byte*>(into.fields[f].tensor.mutable_data_ptr());
    rows.emplace_back(data + static_cast<std::size_t>(into.elements) * bytes, bytes);
  }
  ElementWriter writer(source->fields(), std::move(rows));
  if (!source->next(writer)) return false;
  ++into.elements;
  return true;
}

std::vector<Reference::State::MicroBatch> Reference::State::next_micro_batches() {
  const auto ranks = static_cast<std::size_t>(config.nprocs);
  const auto accumulation = static_cast<std::size_t>(config.grad_accumulation_steps);
  const auto batch_size = static_cast<std::size_t>(config.batch_size_per_device);
  std::vector<MicroBatch> out;
  for (std::size_t rank = 0; rank < ranks; ++rank)
    for (std::size_t i = 0; i < accumulation; ++i) out.push_back(empty_micro_batch(rank));
  for (std::size_t element = 0; element < ranks * accumulation * batch_size; ++element) {
    const auto rank = element % ranks, of_rank = element / ranks;
    if (!read_element(out[rank * accumulation + of_rank / batch_size])) break;
  }
  std::erase_if(out, [](const MicroBatch& batch) { return batch.elements == 0; });
  for (auto& batch : out)
    for (auto& field : batch.fields) field.tensor = field.tensor.narrow(0, 0, batch.elements);
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
  const auto weight = [&](const State::MicroBatch& batch) {
    return by_samples ? double(batch.elements) : 1.0;
  };
  double weights = 0;
  for (const auto& batch : batches) weights += weight(batch);

  Step out;
  for (const auto& batch : batches) {
    const double share = weight(batch) / weights;
    const auto outputs = state_->replicas[batch.rank]->forward(Batch(batch.fields));
    outputs.loss.mul(share).backward();
    out.loss += outputs.loss.item().toDouble() * share;
    out.samples += static_cast<std::uint64_t>(batch.elements);
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
