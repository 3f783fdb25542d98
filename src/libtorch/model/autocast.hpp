// torch's automatic mixed precision: matrix products and convolutions in bfloat16 or float16.
#pragma once

#include <c10/core/DeviceType.h>

#include "accelmgr/config.hpp"
#include "base/unmovable.hpp"

namespace accelmgr::model {

/// While an object exists, operators that this thread calls on `device` cast their inputs to that dtype where
/// torch considers that safe. Put it around forward() and the loss, not around backward(). AutocastScope with
/// `off` does nothing. Scopes nest.
class AutocastScope : base::Unmovable {
 public:
  explicit AutocastScope(Autocast autocast, c10::DeviceType device = c10::DeviceType::CPU);
  ~AutocastScope();

 private:
  bool on_;
  c10::DeviceType device_;
  bool was_enabled_ = false;
  int previous_dtype_ = 0;  ///< An at::ScalarType; an int, so that this header needs none of torch's.
};

/// True if this thread's operators on the CPU now cast their inputs.
bool autocast_enabled();

}  // namespace accelmgr::model
