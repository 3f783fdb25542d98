// Giving up a wait before its deadline, because the thread that waits is wanted elsewhere: by a signal
// handler of an interpreter, for instance.
#pragma once

#include <functional>
#include <utility>

namespace accelmgr::base {

namespace detail {
inline thread_local const std::function<bool()>* interruption = nullptr;
}

/// Asked by waits between their looks, once they take longer than a few milliseconds.
inline bool interrupted() { return detail::interruption != nullptr && (*detail::interruption)(); }

/// What interrupted() asks in this thread, as long as this object lives. `hook` must outlive it.
class InterruptionScope {
 public:
  explicit InterruptionScope(const std::function<bool()>& hook) noexcept
      : before_(std::exchange(detail::interruption, &hook)) {}
  ~InterruptionScope() { detail::interruption = before_; }
  InterruptionScope(const InterruptionScope&) = delete;
  InterruptionScope& operator=(const InterruptionScope&) = delete;

 private:
  const std::function<bool()>* before_;
};

}  // namespace accelmgr::base
