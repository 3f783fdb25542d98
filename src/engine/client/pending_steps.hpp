// What makes the steps of a PendingSteps: a thread of this process, or a service, for which a thread asks.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "accelmgr/pending_steps.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr {

struct PendingSteps::Core {
  /// Of steps that are made elsewhere, or here.
  struct Source {
    /// Called by the thread, first with 0. Blocks for the next results, or for a while. False: there are no
    /// more.
    std::function<bool(std::vector<StepResult>& made, std::size_t known)> next;
    /// Ends the steps before the next one. The thread that cancels calls it; next() returns false soon after.
    std::function<void()> cancel;
  };

  /// Starts the thread. Throws SystemError.
  explicit Core(Source source);
  /// Calls leave().
  ~Core();

  /// Ends the thread, and not what is made elsewhere. Blocks while a step is made here.
  void leave() noexcept;

  pid_t owner = getpid();
  Source source;
  base::UniqueFd over;  ///< An eventfd.
  std::atomic<bool> is_over = false, leaves = false;
  mutable std::mutex mutex;
  // Guarded by the mutex.
  std::vector<StepResult> made;
  std::exception_ptr thrown;
  std::mutex joining;
  std::thread thread;  ///< Guarded by `joining`.
};

}  // namespace accelmgr
