// What the built-in models are made of: parameters with names, a few layers, dropout.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "accelmgr/model.hpp"

namespace accelmgr::model {

/// y = x W^T + b, on [rows, in].
struct Linear {
  at::Tensor weight;  ///< [out, in]
  at::Tensor bias;    ///< [out]
  at::Tensor operator()(const at::Tensor& x) const;
};

/// Normalizes the last dimension.
struct LayerNorm {
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor operator()(const at::Tensor& x) const;
};

/// A model that owns its parameters and buffers. The same tensor objects for its lifetime: what a layer holds
/// and what parameters() returns are one TensorImpl each, so `set_data` on either is seen by both.
class ParameterModel : public Model {
 public:
  std::vector<NamedTensor> parameters() final { return parameters_; }
  std::vector<NamedTensor> buffers() final { return buffers_; }
  void train(bool on) final { training_ = on; }

 protected:
  bool training() const { return training_; }

  /// Makes `initial` a leaf that requires grad and lists it.
  at::Tensor parameter(const std::string& name, at::Tensor initial);
  at::Tensor buffer(const std::string& name, at::Tensor initial);
  /// Lists a parameter under a second name: a tied weight.
  void tie(const std::string& name, const at::Tensor& parameter) { parameters_.push_back({name, parameter}); }

  /// Initial values uniform within 1 / sqrt(in), as torch.nn.Linear has them.
  Linear linear(const std::string& name, std::int64_t in, std::int64_t out);
  /// Weights normal with `deviation`, biases 0.
  Linear normal_linear(const std::string& name, std::int64_t in, std::int64_t out, double deviation);
  LayerNorm layer_norm(const std::string& name, std::int64_t width);

 private:
  std::vector<NamedTensor> parameters_;
  std::vector<NamedTensor> buffers_;
  bool training_ = true;
};

/// Fresh tensors of torch's default dtype, from its default generator.
at::Tensor uniform(at::IntArrayRef shape, double bound);
at::Tensor normal(at::IntArrayRef shape, double deviation);

/// A field of the batch, checked: `shape` is without the batch dimension, -1 fits any length. A
/// floating-point `dtype` takes any floating-point field and converts it. Throws ModelError that says what
/// the field is and what it must be.
at::Tensor field(const Batch& batch, const std::string& name, at::ScalarType dtype, at::IntArrayRef shape);

/// 0 with probability `rate`, else 1 / (1 - rate): what dropout multiplies by. Drawn from torch's default
/// generator, hence reproduced by its state; at::bernoulli_() takes ten times as long (1 million
/// elements: 4.6 ms).
at::Tensor dropout_mask(at::IntArrayRef shape, double rate, at::ScalarType dtype);

/// `residual` + dropout(`branch`), in one pass. `rate` 0 adds `branch` as it is.
at::Tensor add_dropped(const at::Tensor& residual, const at::Tensor& branch, double rate);

}  // namespace accelmgr::model
