// Waits that Ctrl-C ends, and not the program.
#pragma once

#include <signal.h>

#include <cstdint>
#include <ctime>
#include <functional>

#include "base/interruption.hpp"

namespace accelmgr::program {

/// While it lives, Ctrl-C and SIGTERM end a wait of this thread (base::interrupted()), and not this program.
class Interruptible {
 public:
  Interruptible() {
    sigemptyset(&signals_);
    sigaddset(&signals_, SIGINT);
    sigaddset(&signals_, SIGTERM);
    sigprocmask(SIG_BLOCK, &signals_, &before_);
  }
  ~Interruptible() { sigprocmask(SIG_SETMASK, &before_, nullptr); }
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

  bool interrupted() {
    wait(0);
    return interrupted_;
  }
  void wait(std::int64_t ns) {
    const timespec patience{.tv_sec = ns / 1'000'000'000, .tv_nsec = ns % 1'000'000'000};
    if (!interrupted_) interrupted_ = sigtimedwait(&signals_, nullptr, &patience) > 0;
  }

 private:
  sigset_t signals_, before_;
  bool interrupted_ = false;
  std::function<bool()> hook_ = [this] { return interrupted(); };
  base::InterruptionScope scope_{hook_};
};

}  // namespace accelmgr::program
