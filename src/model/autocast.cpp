#include "model/autocast.hpp"

#include <ATen/autocast_mode.h>

namespace accelmgr::model {

AutocastScope::AutocastScope(bool on) : on_(on) {
  if (!on_) return;
  was_enabled_ = at::autocast::is_autocast_enabled(at::kCPU);
  previous_dtype_ = static_cast<int>(at::autocast::get_autocast_dtype(at::kCPU));
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::increment_nesting();
}

AutocastScope::~AutocastScope() {
  if (!on_) return;
  // The cache holds parameters as they were cast: after this forward() the optimizer may change them.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, was_enabled_);
  at::autocast::set_autocast_dtype(at::kCPU, static_cast<at::ScalarType>(previous_dtype_));
}

bool autocast_enabled() { return at::autocast::is_autocast_enabled(at::kCPU); }

}  // namespace accelmgr::model
