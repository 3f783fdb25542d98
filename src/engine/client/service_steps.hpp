// The steps that a service makes while nobody waits for them (POST /v1/step with "wait": false).
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "accelmgr/step_result.hpp"

namespace accelmgr::client {

/// The state of these steps.
struct ServiceSteps {
  bool under_way = false;
  std::string error{};                ///< What ended the steps, if no result says it; else empty.
  std::vector<StepResult> results{};  ///< The results after the first `known`, without StepResult::causes.
  bool is_all = true;                 ///< There are no further results yet.
};

// Each asks the service whose socket is at `path`, and blocks for its answer. Any thread. They throw
// SessionError: the service is gone, or refuses.

/// Has the service make `count` steps. inner: with the update that the session keeps
/// (HostView::keep_update()).
void begin_service_steps(const std::string& path, int count, const StepOptions& options, double timeout_s,
                         bool inner);
ServiceSteps service_steps(const std::string& path, std::size_t known);
/// Ends them before the next one. Blocks until the step under way is over, at most `timeout_s`.
void cancel_service_steps(const std::string& path, double timeout_s);

}  // namespace accelmgr::client
