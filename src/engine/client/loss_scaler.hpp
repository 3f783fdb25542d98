// The scale of the loss under `runners.autocast: fp16`: how it grows and shrinks. The rule is that of
// torch.amp.GradScaler, except that a step with too large a scale is tried again instead of left out.
//
//   a step commits, all values finite      one more good step; after `growth_steps` of them the scale doubles
//   an attempt has infinite gradients      half the scale, and the same elements again
//   the same at the least scale            the values are not finite by themselves: `on_nonfinite` decides
//   a loss is infinite or NaN              no scale changes that: `on_nonfinite` decides
//
// An attempt that does not commit, or that commits values that are not finite, does not change the scale.
//
// The scale is a power of two, so it rounds nothing: the master has the bits of a run without scale that
// computes in a wider float16. Only what is below 2^-126 in float32 differs: it is rounded once, when the
// scale is taken out, and not in each operation.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "accelmgr/config.hpp"
#include "engine/session/layout.hpp"

namespace accelmgr::client {

class LossScaler {
 public:
  /// Least: gradients up to 6e7 fit float16; from 65536 it takes 27 attempts to get there. Largest: the
  /// scaled loss and gradients fit float32.
  static constexpr double least = 0x1p-10, largest = 0x1p60;

  explicit LossScaler(const RunnersConfig& runners) noexcept
      : scales_(runners.autocast == Autocast::fp16),
        initial_(runners.loss_scale.initial),
        growth_steps_(static_cast<std::uint64_t>(runners.loss_scale.growth_steps)) {}

  /// The next attempt is the first one of a step.
  void begin_step() noexcept { halvings_ = 0; }
  /// The last attempt had infinite gradients, and the next one has half its scale.
  void lower() noexcept { ++halvings_; }
  /// The scale of the next attempt.
  double scale(const session::LossScale& committed) const noexcept {
    return std::ldexp(first(committed), -halvings_);
  }
  /// The scale with which a step begins; 1 unless autocast is fp16.
  double first(const session::LossScale& committed) const noexcept {
    if (!scales_) return 1;
    return committed.scale > 0 ? std::clamp(committed.scale, least, largest) : initial_;
  }
  /// Whether infinite gradients under this scale may be finite under half of it.
  bool can_lower(double scale) const noexcept { return scales_ && scale > least; }
  /// The state after a step that commits with `scale` and with finite values.
  session::LossScale after(const session::LossScale& committed, double scale) const noexcept {
    if (!scales_) return committed;
    session::LossScale next{scale, committed.scale == scale ? committed.good_steps + 1 : 1};
    if (growth_steps_ > 0 && next.good_steps >= growth_steps_) next = {std::min(2 * scale, largest), 0};
    return next;
  }

 private:
  bool scales_;
  double initial_;
  std::uint64_t growth_steps_;
  int halvings_ = 0;  ///< In the step under way.
};

}  // namespace accelmgr::client
