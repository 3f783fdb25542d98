// Who applies the gradients of a step.
#pragma once

namespace accelmgr::client {

enum class StepKind {
  outer,  ///< The host.
  /// The replicas: their parameters stay with them. Only for models that have Replica::apply().
  first_inner,
  inner,  ///< A further one, by the same runners: if one was replaced since, the step ends as runner_lost.
};

}  // namespace accelmgr::client
