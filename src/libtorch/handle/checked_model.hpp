// What replicas of libtorch share, wherever they compute: a model with its tensors, each listed once, and
// checks of what it does.
#pragma once

#include <c10/util/Exception.h>

#include <memory>
#include <utility>
#include <vector>

#include "accelmgr/config.hpp"
#include "accelmgr/errors.hpp"
#include "accelmgr/model.hpp"
#include "base/exception_text.hpp"
#include "engine/replica/replica.hpp"
#include "libtorch/tensor/device_failure.hpp"

namespace accelmgr::libtorch {

/// Runs `body`, a part of an attempt. Errors of torch become ModelError, because the same batch would cause
/// them again; what a device reports becomes device::DeviceError.
template <class Body>
decltype(auto) in_model(Body&& body) {
  try {
    return std::forward<Body>(body)();
  } catch (const c10::Error&) {
    tensor::rethrow_device_failure();
    throw ModelError(base::current_exception_text());
  }
}

class CheckedModel {
 public:
  /// `config` outlives it.
  CheckedModel(const Config& config, std::unique_ptr<Model> model)
      : config_(config), model_(std::move(model)) {}

  /// See replica::Replica::describe().
  replica::Description describe();

  /// Each once, in the order of the manifest.
  /// Requires: describe() was called.
  const std::vector<NamedTensor>& parameters() const noexcept { return parameters_; }
  const std::vector<NamedTensor>& buffers() const noexcept { return buffers_; }
  /// Call it before buffers are read or written: a model can then put back a listed tensor that it replaced.
  void restore_buffers() { model_->buffers(); }

  /// Gives parameter `index` the memory of `values`, in which it is to stay. Call it for each in order.
  void place_parameter(std::size_t index, const at::Tensor& values);
  /// Throws ModelError unless the model still has its original parameters, and they lie where they were
  /// placed.
  void check_places() const;

  /// forward(), with autocast where it is configured. The loss is checked, float32 or float64, and divided by
  /// `divisor`. Call it within in_model().
  Outputs forward(const Batch& batch, double divisor, c10::DeviceType device);

 private:
  const Config& config_;
  std::unique_ptr<Model> model_;
  std::vector<NamedTensor> parameters_;
  std::vector<NamedTensor> buffers_;
  std::vector<const void*> addresses_;  ///< Where each parameter must lie.
};

}  // namespace accelmgr::libtorch
