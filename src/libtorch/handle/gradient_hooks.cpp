#include "libtorch/handle/gradient_hooks.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace accelmgr::libtorch {

at::Tensor dense_gradient(const at::Tensor& parameter) {
  const auto dense = parameter.grad().is_sparse() ? parameter.grad().to_dense() : parameter.grad();
  auto resolved = dense.resolve_conj().resolve_neg();
  if (parameter.is_contiguous() || !parameter.is_non_overlapping_and_dense()) return resolved.contiguous();
  if (resolved.strides() == parameter.strides()) return resolved;
  return at::empty_strided(parameter.sizes(), parameter.strides(), resolved.options()).copy_(resolved);
}

using torch::autograd::PostAccumulateGradHook;

struct GradientHooks::State {
  std::vector<at::Tensor> parameters;
  Completed completed;
  std::vector<at::Tensor> aside{};                     ///< `.grad` of each parameter while forward() runs.
  std::vector<const PostAccumulateGradHook*> alone{};  ///< Our hook, if it is the parameter's only one.
  bool counts = false;                                 ///< The backward pass of the loss is under way.

  void complete(std::size_t index) { completed(index, parameters[index]); }
  /// Whether `.grad` keeps the sum over micro-batches.
  bool stays(std::size_t index) const {
    const auto* ours = alone[index];
    return ours == nullptr || torch::autograd::impl::post_acc_grad_hooks(parameters[index]).get() != ours;
  }
};

namespace {

/// Holds the state by a weak pointer: the state owns the parameters, and they own their hooks.
template <class State>
class Hook final : public PostAccumulateGradHook {
 public:
  Hook(const std::shared_ptr<State>& state, std::size_t index, std::unique_ptr<PostAccumulateGradHook> before)
      : state_(state), index_(index), before_(std::move(before)) {}
  void operator()(const torch::autograd::Variable& parameter) override {
    if (before_)
      (*before_)(parameter);  // The model's own hook. .grad stays until finish().
    else if (const auto state = state_.lock(); state && state->counts)
      state->complete(index_);
  }

 private:
  std::weak_ptr<State> state_;
  std::size_t index_;
  std::unique_ptr<PostAccumulateGradHook> before_;
};

}  // namespace

GradientHooks::GradientHooks(std::vector<at::Tensor> parameters, replica::GradientSink& sink)
    : GradientHooks(
          std::move(parameters),
          [&sink](std::size_t index, const at::Tensor& parameter) {
            const auto dense = dense_gradient(parameter);
            parameter.mutable_grad().reset();
            sink.capture(index, dense.const_data_ptr());
          },
          false) {}

GradientHooks::GradientHooks(std::vector<at::Tensor> parameters, Completed completed)
    : GradientHooks(std::move(parameters), std::move(completed), true) {}

GradientHooks::GradientHooks(std::vector<at::Tensor> parameters, Completed completed, bool stays)
    : state_(std::make_shared<State>(
          State{.parameters = std::move(parameters), .completed = std::move(completed)})) {
  namespace autograd = torch::autograd::impl;
  state_->aside.resize(state_->parameters.size());
  for (std::size_t i = 0; i < state_->parameters.size(); ++i) {
    const auto& parameter = state_->parameters[i];
    autograd::materialize_autograd_meta(parameter);
    auto before = std::move(autograd::post_acc_grad_hooks(parameter));
    const bool alone = !stays && before == nullptr;
    auto ours = std::make_unique<Hook<State>>(state_, i, std::move(before));
    state_->alone.push_back(alone ? ours.get() : nullptr);
    autograd::set_post_acc_grad_hooks(parameter, std::move(ours));
  }
}

GradientHooks::~GradientHooks() = default;

void GradientHooks::begin_micro_batch() {
  for (std::size_t i = 0; i < state_->parameters.size(); ++i)
    state_->aside[i] = std::exchange(state_->parameters[i].mutable_grad(), {});
}

void GradientHooks::begin_backward() {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < state_->parameters.size(); ++i) {
    if (!state_->aside[i].defined()) continue;
    auto& gradient = state_->parameters[i].mutable_grad();
    if (gradient.defined()) state_->aside[i] = at::add(state_->aside[i], gradient);
    gradient = std::exchange(state_->aside[i], {});
  }
  state_->counts = true;
}

void GradientHooks::end_backward() {
  state_->counts = false;
  for (std::size_t i = 0; i < state_->parameters.size(); ++i)
    if (!state_->stays(i) && state_->parameters[i].grad().defined()) state_->complete(i);
}

void GradientHooks::begin() {
  state_->counts = false;
  state_->aside.assign(state_->parameters.size(), {});
  for (const auto& parameter : state_->parameters)
    if (parameter.grad().defined()) parameter.mutable_grad().reset();
}

void GradientHooks::finish() {
  for (std::size_t i = 0; i < state_->parameters.size(); ++i)
    if (state_->parameters[i].grad().defined()) state_->complete(i);
}

}  // namespace accelmgr::libtorch
