#include <algorithm>
#include <cmath>
#include <numbers>

#include "accelmgr/optimizer.hpp"

namespace accelmgr {

double scheduled_learning_rate(const OptimizerConfig& config, std::int64_t update,
                               std::int64_t total_updates) {
  const std::int64_t warmup = config.warmup_updates;
  if (update < warmup) {
    return config.learning_rate * static_cast<double>(update + 1) / static_cast<double>(warmup);
  }
  if (config.schedule == Schedule::constant) return config.learning_rate;

  const std::int64_t decay_updates = total_updates - 1 - warmup;
  const double progress =
      decay_updates > 0
          ? std::min(1.0, static_cast<double>(update - warmup) / static_cast<double>(decay_updates))
          : 1.0;
  const double falling = 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  const double ratio = config.final_learning_rate_ratio;
  return config.learning_rate * (ratio + (1.0 - ratio) * falling);
}

}  // namespace accelmgr
