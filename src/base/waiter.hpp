// The caller of a long wait. It can tell the wait to end early.
#pragma once

#include <string>

namespace accelmgr::base {

class Waiter {
 public:
  virtual ~Waiter() = default;
  /// A sign of life, given about every 20 ms during a wait. False: the result is no longer wanted, so the
  /// wait should end and leave its work unfinished.
  virtual bool wanted() = 0;
  /// Work that was to be aborted does not end, and may go on to write to memory of this process. A process
  /// that would free that memory ends here. Called by the thread that has waited for the end.
  virtual void never_ends(const std::string& /*what*/) {}
};

}  // namespace accelmgr::base
