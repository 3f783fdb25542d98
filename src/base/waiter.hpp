// The caller of a long wait. It can tell the wait to end early.
#pragma once

namespace accelmgr::base {

class Waiter {
 public:
  virtual ~Waiter() = default;
  /// A sign of life, given about every 20 ms during a wait. False: the result is no longer wanted, so the
  /// wait should end and leave its work unfinished.
  virtual bool wanted() = 0;
};

}  // namespace accelmgr::base
