// Calls a model's forward(), and makes torch's errors readable for a user.
#pragma once

#include "accelmgr/model.hpp"

namespace accelmgr::model {

/// Calls model.forward(batch). An error of torch becomes a ModelError that lists the fields of the batch and
/// leaves out torch's C++ frames; one that tells of a device becomes a device::DeviceError. Other exceptions
/// pass unchanged.
Outputs checked_forward(Model& model, const Batch& batch);

}  // namespace accelmgr::model
