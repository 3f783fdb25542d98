// Checks the loss that a model's forward() returned.
#pragma once

#include "accelmgr/model.hpp"

namespace accelmgr::model {

/// Returns the loss of `outputs`. It must be one floating-point number, and require grad while gradients are
/// recorded; otherwise throws ModelError, which names its shape and dtype.
at::Tensor checked_loss(const Outputs& outputs);

}  // namespace accelmgr::model
