// The loss of the master model on elements that are never trained on, computed in the host between steps.
#pragma once

#include <memory>

#include "accelmgr/manager.hpp"

namespace accelmgr {

/// A replica in evaluation mode whose parameters are the master's memory. Used by the manager's thread;
/// blocks for the arithmetic.
class Evaluator {
 public:
  /// Throws ConfigError when the configured data source holds nothing out, DataError and ModelError as
  /// make_data() and make_model().
  explicit Evaluator(Manager& manager);
  ~Evaluator();

  /// Mean loss over all held-out elements. What the model and the source throw is ModelError and DataError.
  double loss();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace accelmgr
