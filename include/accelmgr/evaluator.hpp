// The loss of the master model on elements that are never trained on, computed in the host between steps.
#pragma once

#include <memory>

#include "accelmgr/manager.hpp"

namespace accelmgr {

/// A replica in evaluation mode whose parameters are the master's memory. Use it from the thread that uses
/// `manager`, which must outlive it. loss() blocks while it computes.
class Evaluator {
 public:
  /// Throws ConfigError when the configured data source has no held-out elements, and DataError and
  /// ModelError as make_data() and make_model() do.
  explicit Evaluator(Manager& manager);
  ~Evaluator();

  /// Mean loss over all held-out elements. An exception of the model becomes ModelError, one of the data
  /// source DataError.
  double loss();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace accelmgr
