#include <algorithm>

#include "accelmgr/optimizer.hpp"
#include "libtorch/handle/optimizer_state.hpp"

namespace accelmgr {

session::RateSchedule libtorch::schedule_of(const OptimizerConfig& config, std::int64_t total_updates) {
  if (config.schedule == Schedule::constant) return {.warmup_updates = config.warmup_updates};
  return {.warmup_updates = config.warmup_updates,
          .total_updates = std::max<std::int64_t>(total_updates, 1),
          .final_ratio = config.final_learning_rate_ratio};
}

double scheduled_learning_rate(const OptimizerConfig& config, std::int64_t update,
                               std::int64_t total_updates) {
  return libtorch::schedule_of(config, total_updates).rate(config.learning_rate, update);
}

}  // namespace accelmgr
