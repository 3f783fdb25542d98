// What is done about a lost runner: `runners.on_loss` and its limits. Pure: the caller tells the time.
#pragma once

#include <cstdint>
#include <deque>
#include <string>

#include "accelmgr/config.hpp"

namespace accelmgr::manager {

struct Decision {
  enum class Kind { replace, leave_out, give_up };
  Kind kind = Kind::give_up;
  std::int64_t delay_ns = 0;  ///< replace: so long from now.
  std::string why{};          ///< give_up: which limit was met.
};

class RestartPolicy {
 public:
  explicit RestartPolicy(const RunnersConfig& config) : config_(config) {}

  /// A runner was lost; `others` are left. A loss with `repeatable` false (the model is wrong, not the
  /// process) comes again with every replacement.
  Decision runner_lost(std::int64_t now_ns, int others, bool repeatable);
  /// The launcher was lost, and all runners with it: that is one loss, whatever their number.
  Decision launcher_lost(std::int64_t now_ns);

 private:
  Decision replace(std::int64_t now_ns);

  RunnersConfig config_;
  int replaced_ = 0;
  std::deque<std::int64_t> recent_ns_;  ///< Replacements within the window.
};

}  // namespace accelmgr::manager
