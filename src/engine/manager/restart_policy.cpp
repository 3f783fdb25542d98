#include "engine/manager/restart_policy.hpp"
#include "base/timing.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace accelmgr::manager {
namespace {

Decision give_up(std::string why) { return {Decision::Kind::give_up, 0, std::move(why)}; }

}  // namespace

Decision RestartPolicy::runner_lost(std::int64_t now_ns, int others, const std::string& recurs) {
  if (config_.on_loss == LossPolicy::fail) return give_up("runners.on_loss is fail");
  if (!recurs.empty()) return give_up(recurs);
  if (config_.on_loss == LossPolicy::restart) return replace(now_ns);
  if (others < config_.min_runners)
    return give_up(
        fmt::format("{} runners are left, but runners.min_runners is {}", others, config_.min_runners));
  return {Decision::Kind::leave_out};
}

Decision RestartPolicy::lost_with_another() const {
  if (config_.on_loss == LossPolicy::fail) return give_up("runners.on_loss is fail");
  return {Decision::Kind::replace};
}

Decision RestartPolicy::fork_server_lost(std::int64_t now_ns) {
  if (config_.on_loss == LossPolicy::fail) return give_up("runners.on_loss is fail");
  return replace(now_ns);
}

Decision RestartPolicy::replace(std::int64_t now_ns) {
  const auto window_ns = static_cast<std::int64_t>(config_.restart_window * 1e9);
  while (!recent_ns_.empty() && now_ns - recent_ns_.front() >= window_ns) recent_ns_.pop_front();
  if (replaced_ >= config_.max_restarts)
    return give_up(fmt::format("there were {} restarts, all that runners.max_restarts allows", replaced_));
  const auto recent = static_cast<int>(recent_ns_.size());
  if (config_.restarts_per_window > 0 && recent >= config_.restarts_per_window)
    return give_up(fmt::format("there were {} restarts within {} s (runners.restarts_per_window)", recent,
                               config_.restart_window));
  ++replaced_;
  recent_ns_.push_back(now_ns);
  double delay_s = recent == 0 ? 0 : config_.restart_backoff;
  for (int i = 1; i < recent && delay_s < timing::longest_backoff_s; ++i) delay_s *= 2;
  return {Decision::Kind::replace,
          static_cast<std::int64_t>(std::min(delay_s, timing::longest_backoff_s) * 1e9)};
}

}  // namespace accelmgr::manager
