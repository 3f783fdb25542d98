#include "libtorch/model/autocast.hpp"

#include <ATen/autocast_mode.h>

namespace accelmgr::model {

AutocastScope::AutocastScope(Autocast autocast, c10::DeviceType device)
    : on_(autocast != Autocast::off), device_(device) {
  if (!on_) return;
  was_enabled_ = at::autocast::is_autocast_enabled(device_);
  previous_dtype_ = static_cast<int>(at::autocast::get_autocast_dtype(device_));
  at::autocast::set_autocast_dtype(device_, autocast == Autocast::fp16 ? at::kHalf : at::kBFloat16);
  at::autocast::set_autocast_enabled(device_, true);
  at::autocast::increment_nesting();
}

AutocastScope::~AutocastScope() {
  if (!on_) return;
  // The cache holds cast copies of parameters, which the optimizer may change after this forward().
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, was_enabled_);
  at::autocast::set_autocast_dtype(device_, static_cast<at::ScalarType>(previous_dtype_));
}

bool autocast_enabled() { return at::autocast::is_autocast_enabled(at::kCPU); }

}  // namespace accelmgr::model
