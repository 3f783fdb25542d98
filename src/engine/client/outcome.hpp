// What became of an attempt, or of waiting for one to begin.
#pragma once

#include <string>

#include "accelmgr/step_result.hpp"

namespace accelmgr::client {

struct Outcome {
  StepStatus status = StepStatus::ok;
  std::string error{};
  int rank = -1;
  std::string error_type{};
  bool overflow = false;            ///< nonfinite: half the loss scale may be enough.
  bool device_team_failed = false;  ///< runner_lost: the team of devices failed; no runner was lost.
};

}  // namespace accelmgr::client
