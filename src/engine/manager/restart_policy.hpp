// Decides what is done about a lost runner, by `runners.on_loss` and its limits. The caller passes the time.
#pragma once

#include <cstdint>
#include <deque>
#include <string>

#include "accelmgr/config.hpp"

namespace accelmgr::manager {

struct Decision {
  enum class Kind { replace, leave_out, give_up };
  Kind kind = Kind::give_up;
  std::int64_t delay_ns = 0;  ///< replace: how long to wait before the start.
  std::string why{};          ///< give_up: the reason, for an error text.
};

class RestartPolicy {
 public:
  explicit RestartPolicy(const RunnersConfig& config) : config_(config) {}
  /// From now on decides by `config`. What was replaced before counts.
  void change(const RunnersConfig& config) { config_ = config; }

  /// A runner was lost, and `others` are left in the team. `recurs`: why a replacement would be lost in the
  /// same way; then the policy gives up. Empty: there is no such reason.
  Decision runner_lost(std::int64_t now_ns, int others, const std::string& recurs);
  /// A runner was lost because another runner was lost, and the policy knows of that loss already. The second
  /// loss counts towards no limit. The runner is replaced even if on_loss is shrink.
  Decision lost_with_another() const;
  /// The fork server was lost, and all runners with it. That counts as one loss. The runners are replaced
  /// even if on_loss is shrink.
  Decision fork_server_lost(std::int64_t now_ns);

 private:
  Decision replace(std::int64_t now_ns);

  RunnersConfig config_;
  int replaced_ = 0;
  std::deque<std::int64_t> recent_ns_;  ///< Replacements within the window.
};

}  // namespace accelmgr::manager
