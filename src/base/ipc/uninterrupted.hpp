// Calls of the kernel that give memory. Under the timer of a profiler they would never end: each signal makes
// them begin anew.
#pragma once

#include <signal.h>

#include <cerrno>

#include "base/unmovable.hpp"

namespace accelmgr::ipc {

/// While it exists, no signal comes to this thread.
class SignalsBlocked : base::Unmovable {
 public:
  SignalsBlocked() noexcept {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

/// Makes a call that returns 0 or an errno value, repeats it at EINTR, and returns the value. No signal comes
/// to this thread meanwhile, so the call is interrupted only when this process is stopped or traced. If that
/// does not end, the last EINTR is returned.
template <class Call>
int uninterrupted(const Call& call) noexcept {
  constexpr int most_attempts = 100;
  const SignalsBlocked blocked;
  int error = EINTR;
  for (int attempt = 0; error == EINTR && attempt < most_attempts; ++attempt) error = call();
  return error;
}

}  // namespace accelmgr::ipc
