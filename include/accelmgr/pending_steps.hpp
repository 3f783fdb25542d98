// Inner steps that are made while the host does something else.
#pragma once

#include <limits>
#include <memory>
#include <vector>

#include "accelmgr/step_result.hpp"

namespace accelmgr {

/// Steps that Manager::begin_steps() has begun. Any thread may call all members. While the steps are under
/// way, the manager takes no calls that step, write or change the session. The object may outlive the
/// manager. The manager's stop() and destructor cancel the steps, unless a service makes them.
class PendingSteps {
 public:
  struct Core;
  explicit PendingSteps(std::shared_ptr<Core> core) : core_(std::move(core)) {}

  /// Whether the steps are over: all are made, one has failed, the data has ended, or they were cancelled.
  bool done() const noexcept;
  /// A descriptor that is readable when they are over, and stays so. The last copy of this object closes it.
  int fileno() const noexcept;
  /// Blocks until they are over, at most `timeout_s`. Returns whether they are.
  bool wait(double timeout_s = std::numeric_limits<double>::infinity()) const noexcept;
  /// The results of the steps that were made so far. Does not block.
  std::vector<StepResult> results() const;
  /// Blocks until they are over, and returns the results of all that were made; the last one may have failed.
  /// Throws what step() has thrown; of a service, SessionError.
  std::vector<StepResult> result() const;
  /// Ends them before the next one; what was made counts. Blocks until the step under way is over. Throws
  /// SessionError when a service does not answer.
  void cancel();

 private:
  std::shared_ptr<Core> core_;
};

}  // namespace accelmgr
