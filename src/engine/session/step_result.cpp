#include "accelmgr/step_result.hpp"

namespace accelmgr {

const char* to_string(StepStatus status) noexcept {
  switch (status) {
    case StepStatus::ok:
      return "ok";
    case StepStatus::data_end:
      return "data_end";
    case StepStatus::runner_lost:
      return "runner_lost";
    case StepStatus::nonfinite:
      return "nonfinite";
    case StepStatus::timeout:
      return "timeout";
    case StepStatus::manager_lost:
      return "manager_lost";
  }
  return "?";
}

}  // namespace accelmgr
