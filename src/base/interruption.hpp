// Ends a wait before its deadline because its thread is needed elsewhere, for instance by a signal handler of
// an interpreter.
#pragma once

#include <functional>
#include <utility>

#include "base/unmovable.hpp"

namespace accelmgr::base {

namespace detail {
inline thread_local const std::function<bool()>* interruption = nullptr;
}

/// Whether a wait of this thread must end now. Waits that take longer than a few milliseconds ask repeatedly.
inline bool interrupted() { return detail::interruption != nullptr && (*detail::interruption)(); }
/// The same, for Patience.
inline const std::function<bool()> asks_interrupted = interrupted;

/// While this object lives, interrupted() calls `hook` in this thread; if that is empty, what it called
/// before. `hook` must outlive it. Scopes nest.
class InterruptionScope : Unmovable {
 public:
  explicit InterruptionScope(const std::function<bool()>& hook) noexcept
      : before_(std::exchange(detail::interruption, hook ? &hook : detail::interruption)) {}
  ~InterruptionScope() { detail::interruption = before_; }

 private:
  const std::function<bool()>* before_;
};

}  // namespace accelmgr::base
