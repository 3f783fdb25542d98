#include "accelmgr/step_result.hpp"

#include "base/enum_names.hpp"

namespace accelmgr {

const char* to_string(StepStatus status) noexcept {
  static constexpr const char* names[]{"ok",        "data_end", "runner_lost",
                                       "nonfinite", "timeout",  "manager_lost"};
  return base::enum_name<StepStatus::manager_lost>(names, status);
}

}  // namespace accelmgr
