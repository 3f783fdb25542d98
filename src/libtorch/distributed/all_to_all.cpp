#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "accelmgr/distributed.hpp"
#include "libtorch/distributed/tensors.hpp"

namespace accelmgr::distributed {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The group of the forward pass, kept for the backward pass.
struct SavedGroup : torch::CustomClassHolder {
  explicit SavedGroup(GroupArgument of) : group(std::move(of)) {}
  GroupArgument group;
};

/// An exchange of blocks is its own transpose, so the backward pass is the same exchange of the gradients.
struct AllToAll : torch::autograd::Function<AllToAll> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const GroupArgument& group) {
    context->saved_data["group"] = c10::IValue::make_capsule(c10::make_intrusive<SavedGroup>(group));
    return exchange_blocks(input, members_of(group));
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto holder = context->saved_data["group"].toCapsule();
    const auto& group = static_cast<const SavedGroup&>(*holder).group;
    return {all_to_all(gradients[0], group), at::Tensor()};
  }
};

}  // namespace

at::Tensor all_to_all(const at::Tensor& input, const GroupArgument& group) {
  const auto members = members_of(group);
  if (!members.communicate()) return input;
  if (at::GradMode::is_enabled() && input.defined() && input.requires_grad())
    return AllToAll::apply(input, group);
  return exchange_blocks(input, members);
}

}  // namespace accelmgr::distributed
