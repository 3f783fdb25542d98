// What a model's forward() must return, checked where it is used.
#pragma once

#include "accelmgr/model.hpp"

namespace accelmgr::model {

/// The loss of `outputs`. Throws ModelError that names its shape and dtype unless it is one floating-point
/// number, which requires grad wherever gradients are recorded.
at::Tensor checked_loss(const Outputs& outputs);

}  // namespace accelmgr::model
