#include "libtorch/handle/checked_model.hpp"

#include <fmt/format.h>

#include "libtorch/model/autocast.hpp"
#include "libtorch/model/checked_forward.hpp"
#include "libtorch/model/checked_loss.hpp"
#include "libtorch/tensor/convert.hpp"

namespace accelmgr::libtorch {
namespace {

[[noreturn]] void refuse(const std::string& name, const char* what) {
  throw ModelError(fmt::format(
      "parameter '{}' {}: gradients of its replacement would be lost. Change parameters in place, "
      "or do not register as a parameter what forward() assigns",
      name, what));
}

}  // namespace

replica::Description CheckedModel::describe() {
  const auto parameters = model_->parameters();
  const auto buffers = model_->buffers();
  parameters_ = tensor::without_repetitions(parameters);
  buffers_ = tensor::without_repetitions(buffers);
  return tensor::describe(parameters, buffers, model_->non_persistent_buffers());
}

void CheckedModel::place_parameter(std::size_t index, const at::Tensor& values) {
  parameters_[index].tensor.set_data(values);
  addresses_.push_back(values.const_data_ptr());
}

void CheckedModel::check_places() const {
  std::size_t next = 0;
  for (const auto& [name, tensor] : model_->parameters()) {
    if (next == parameters_.size() || name != parameters_[next].name) continue;  // An alias.
    if (!tensor.is_same(parameters_[next].tensor)) refuse(name, "was replaced by the model");
    ++next;
  }
  if (next < parameters_.size()) refuse(parameters_[next].name, "is gone from the model");
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& [name, tensor] = parameters_[i];
    if (tensor.numel() > 0 && tensor.const_data_ptr() != addresses_[i])  // An empty tensor has no address.
      refuse(name, "was replaced: it no longer lies in the master's memory (load() or set_data()?)");
  }
}

Outputs CheckedModel::forward(const Batch& batch, double divisor, c10::DeviceType device) {
  Outputs outputs;
  {
    const model::AutocastScope autocast(config_.runners.autocast, device);
    outputs = model::checked_forward(*model_, batch);
    outputs.loss = model::checked_loss(outputs);
    if (outputs.loss.scalar_type() != at::kDouble) outputs.loss = outputs.loss.to(at::kFloat);
  }
  outputs.loss = outputs.loss.div(divisor);
  return outputs;
}

}  // namespace accelmgr::libtorch
