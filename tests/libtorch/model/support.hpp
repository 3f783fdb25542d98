// What tests of models share.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "accelmgr/errors.hpp"
#include "accelmgr/model.hpp"
#include "message_of.hpp"
#include "refusal.hpp"

namespace accelmgr::test {

inline void seed(std::uint64_t value) {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  generator.set_current_seed(value);
}

/// A config with small shapes of every built-in model.
inline Config config_of(const std::string& kind) {
  Config config;
  config.model.kind = kind;
  config.model.mlp = {.input_size = 6, .hidden_size = 8, .hidden_layers = 2, .output_size = 4};
  config.model.convnet = {.image_size = 8, .input_channels = 3, .channels = 4, .classes = 4};
  config.model.gpt = {.layers = 2, .width = 16, .heads = 4, .context = 8, .vocabulary = 32, .dropout = 0.1};
  return config;
}

/// Makes the built-in model, with initial values from a fixed seed.
inline std::unique_ptr<Model> make(const Config& config) {
  seed(7);
  return make_model(config);
}

inline at::Tensor integers(std::int64_t below, at::IntArrayRef shape) {
  return at::randint(below, shape, at::TensorOptions().dtype(at::kLong));
}

/// A batch of four elements for config_of(kind).
inline Batch batch_of(const std::string& kind) {
  seed(11);
  if (kind == "gpt") return Batch({{"input", integers(32, {4, 8})}, {"target", integers(32, {4, 8})}});
  const std::vector<std::int64_t> input =
      kind == "mlp" ? std::vector<std::int64_t>{4, 6} : std::vector<std::int64_t>{4, 3, 8, 8};
  return Batch({{"input", at::randn(input)}, {"target", integers(4, {4})}});
}

inline double value_of(const Outputs& outputs) { return outputs.loss.item().toDouble(); }

/// Copies of all gradients after one backward(). Clears the gradients of the model.
inline std::vector<at::Tensor> gradients(Model& model, const Batch& batch) {
  model.forward(batch).loss.backward();
  std::vector<at::Tensor> out;
  for (const auto& [name, tensor] : model.parameters())
    out.push_back(tensor.grad().defined() ? tensor.grad().clone() : at::Tensor());
  for (const auto& [name, tensor] : model.parameters()) tensor.mutable_grad().reset();
  return out;
}

}  // namespace accelmgr::test
