// A model's forward(), called where what torch throws there must say what a user can use.
#pragma once

#include "accelmgr/model.hpp"

namespace accelmgr::model {

/// model.forward(batch). What torch throws there becomes a ModelError with the fields of the batch, and
/// without torch's frames of C++. Other exceptions pass.
Outputs checked_forward(Model& model, const Batch& batch);

}  // namespace accelmgr::model
