// What the marks of earlier hosts (session::HostControl) say about the gradients in the master.
#pragma once

#include <cstdint>

#include "accelmgr/step_result.hpp"
#include "engine/session/attempt.hpp"
#include "engine/session/session.hpp"

namespace accelmgr::client {

/// `steps`: how many steps are committed.
constexpr LeftGradients left_by(std::uint64_t steps, std::uint64_t zeroed_step,
                                std::uint64_t applied_step) noexcept {
  if (zeroed_step >= steps) return LeftGradients::none;
  return applied_step >= steps ? LeftGradients::applied : LeftGradients::unapplied;
}

/// What earlier hosts have left in the master's gradients.
inline LeftGradients left_in(const session::Session& session) noexcept {
  return left_by(session.counters(session.word().index).steps, session.control().zeroed_step.load(),
                 session::applied_step(session));
}

}  // namespace accelmgr::client
