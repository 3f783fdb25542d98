#include "libtorch/model/checked_loss.hpp"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "accelmgr/errors.hpp"

namespace accelmgr::model {

at::Tensor checked_loss(const Outputs& outputs) {
  const auto& loss = outputs.loss;
  if (!loss.defined()) throw ModelError("the model returned no loss: Outputs::loss is undefined");
  if (loss.numel() != 1 || !loss.is_floating_point()) {
    throw ModelError(
        fmt::format("the loss is {} of shape [{}]; it must be one floating-point number (reduce it, for "
                    "example with mean())",
                    c10::toString(loss.scalar_type()), fmt::join(loss.sizes(), ", ")));
  }
  if (at::GradMode::is_enabled() && !loss.requires_grad())
    throw ModelError(
        "the loss does not require a gradient: it was not computed from parameters, or was detached");
  return loss;
}

}  // namespace accelmgr::model
