#include "libtorch/gradient_hooks.hpp"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace accelmgr::libtorch {

at::Tensor dense_gradient(const at::Tensor& parameter) {
  const auto dense = parameter.grad().is_sparse() ? parameter.grad().to_dense() : parameter.grad();
  return dense.is_contiguous() ? dense : dense.contiguous();
}

struct GradientHooks::State {
  std::vector<at::Tensor> parameters;
  Completed completed;

  void complete(std::size_t index) { completed(index, parameters[index]); }
};

namespace {

using torch::autograd::PostAccumulateGradHook;

/// Holds the state by a weak pointer: the state owns the parameters, and they own their hooks.
template <class State>
class Hook final : public PostAccumulateGradHook {
 public:
  Hook(const std::shared_ptr<State>& state, std::size_t index, std::unique_ptr<PostAccumulateGradHook> before)
      : state_(state), index_(index), before_(std::move(before)) {}
  void operator()(const torch::autograd::Variable& parameter) override {
    if (before_)
      (*before_)(parameter);  // The model's own hook. .grad stays until finish().
    else if (const auto state = state_.lock())
      state->complete(index_);
  }

 private:
  std::weak_ptr<State> state_;
  std::size_t index_;
  std::unique_ptr<PostAccumulateGradHook> before_;
};

}  // namespace

GradientHooks::GradientHooks(std::vector<at::Tensor> parameters, replica::Sink& sink)
    : GradientHooks(std::move(parameters), [&sink](std::size_t index, const at::Tensor& parameter) {
        const auto dense = dense_gradient(parameter);
        parameter.mutable_grad().reset();
        sink.capture(index, dense.const_data_ptr());
      }) {}

GradientHooks::GradientHooks(std::vector<at::Tensor> parameters, Completed completed)
    : state_(std::make_shared<State>(State{std::move(parameters), std::move(completed)})) {
  namespace autograd = torch::autograd::impl;
  for (std::size_t i = 0; i < state_->parameters.size(); ++i) {
    const auto& parameter = state_->parameters[i];
    autograd::materialize_autograd_meta(parameter);
    auto before = std::move(autograd::post_acc_grad_hooks(parameter));
    autograd::set_post_acc_grad_hooks(parameter, std::make_unique<Hook<State>>(state_, i, std::move(before)));
  }
}

GradientHooks::~GradientHooks() = default;

void GradientHooks::begin() {
  for (const auto& parameter : state_->parameters)
    if (parameter.grad().defined()) parameter.mutable_grad().reset();
}

void GradientHooks::finish() {
  for (std::size_t i = 0; i < state_->parameters.size(); ++i)
    if (state_->parameters[i].grad().defined()) state_->complete(i);
}

}  // namespace accelmgr::libtorch
