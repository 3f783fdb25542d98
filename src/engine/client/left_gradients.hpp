// What the marks of earlier hosts (session::HostControl) say about the gradients in the master.
#pragma once

#include <cstdint>

#include "accelmgr/step_result.hpp"

namespace accelmgr::client {

/// `steps`: how many steps are committed.
constexpr LeftGradients left_by(std::uint64_t steps, std::uint64_t zeroed_step,
                                std::uint64_t applied_step) noexcept {
  if (zeroed_step >= steps) return LeftGradients::none;
  return applied_step >= steps ? LeftGradients::applied : LeftGradients::unapplied;
}

}  // namespace accelmgr::client
