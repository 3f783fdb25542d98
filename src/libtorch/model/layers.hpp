// Parts of the built-in models: named parameters, a few layers, dropout.
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

/// A model that owns its parameters and buffers. The tensor objects stay the same for its lifetime. A layer
/// and parameters() share one TensorImpl for each parameter, so `set_data` on either affects both.
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

  /// Initial values are uniform within 1 / sqrt(in), as in torch.nn.Linear.
  Linear linear(const std::string& name, std::int64_t in, std::int64_t out);
  /// Initial weights are normal with `deviation`, biases are 0.
  Linear normal_linear(const std::string& name, std::int64_t in, std::int64_t out, double deviation);
  LayerNorm layer_norm(const std::string& name, std::int64_t width);

 private:
  std::vector<NamedTensor> parameters_;
  std::vector<NamedTensor> buffers_;
  bool training_ = true;
};

/// New tensors of torch's default dtype, with values from its default generator.
at::Tensor uniform(at::IntArrayRef shape, double bound);
at::Tensor normal(at::IntArrayRef shape, double deviation);

/// Returns a field of the batch after a check. `shape` does not include the batch dimension; -1 allows any
/// length. A floating-point `dtype` accepts any floating-point field and converts it. Throws ModelError,
/// which says what the field is and what it must be.
at::Tensor field(const Batch& batch, const std::string& name, at::ScalarType dtype, at::IntArrayRef shape);

/// The factors of dropout: 0 with probability `rate`, else 1 / (1 - rate). They come from the default
/// generator of `device`, so its state reproduces them. On the CPU at::bernoulli_() takes ten times as long
/// (1 million elements: 4.6 ms).
at::Tensor dropout_mask(at::IntArrayRef shape, double rate, at::ScalarType dtype,
                        at::Device device = at::kCPU);

/// `residual` + dropout(`branch`), in one pass. `rate` 0: no dropout.
at::Tensor add_dropped(const at::Tensor& residual, const at::Tensor& branch, double rate);

}  // namespace accelmgr::model
