#include "libtorch/model/linear.hpp"

#include <ATen/Context.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/linear.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string_view>

#include "libtorch/model/autocast.hpp"

namespace accelmgr::model {
namespace {

// From this number of multiplications on, oneDNN's faster kernel outweighs its more expensive call.
constexpr std::int64_t least_product = std::int64_t{1} << 21;

// a [m, k] times the transpose of b [n, k], plus `bias` [n]. `a` and `b` may be transposed views; oneDNN
// copies a transposed `a`.
at::Tensor product(const at::Tensor& a, const at::Tensor& b,
                   const std::optional<at::Tensor>& bias = std::nullopt) {
  using Signature =
      at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, std::string_view,
                 c10::List<std::optional<at::Scalar>>, std::optional<std::string_view>);
  static const auto one_dnn_linear =
      c10::Dispatcher::singleton().findSchemaOrThrow("mkldnn::_linear_pointwise", "").typed<Signature>();
  return one_dnn_linear.call(a, b, bias, "none", c10::List<std::optional<at::Scalar>>(), "");
}

// gradient^T x, of shape [out, in]. oneDNN copies a transposed first factor, so the smaller factor goes
// first.
at::Tensor weight_gradient(const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight) {
  if (x.numel() + weight.numel() < gradient.numel()) return product(x.t(), gradient.t()).t().contiguous();
  return product(gradient.t(), x.t());
}

struct OneDnnLinear : torch::autograd::Function<OneDnnLinear> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
    context->save_for_backward({x, weight});
    context->saved_data["has_bias"] = bias.has_value();
    return product(x, weight, bias);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1];
    const auto gradient = gradients[0].contiguous();
    torch::autograd::variable_list out(3);
    if (context->needs_input_grad(0)) out[0] = product(gradient, weight.t());
    if (context->needs_input_grad(1)) out[1] = weight_gradient(gradient, x, weight);
    if (context->saved_data["has_bias"].toBool() && context->needs_input_grad(2)) out[2] = gradient.sum(0);
    return out;
  }
};

bool suits_one_dnn(const at::Tensor& x, const at::Tensor& weight) {
  return x.is_cpu() && x.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat && x.dim() == 2 &&
         x.size(0) * weight.numel() >= least_product && at::globalContext().userEnabledMkldnn() &&
         !autocast_enabled();
}

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  if (suits_one_dnn(x, weight)) return OneDnnLinear::apply(x, weight, bias);
  return at::linear(x, weight, bias);
}

}  // namespace accelmgr::model
