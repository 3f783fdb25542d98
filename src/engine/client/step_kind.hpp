// Who applies the gradients of a step.
#pragma once

namespace accelmgr::client {

enum class StepKind {
  outer,  ///< The host.
  inner,  ///< The replicas: their parameters stay with them. Only for models that have Replica::apply().
};

}  // namespace accelmgr::client
