// Control of the OpenMP threads that torch's operators leave behind in the host.
#pragma once

#include "base/unmovable.hpp"

namespace accelmgr::client {

/// Ends the idle threads of this thread's OpenMP pool. Its next parallel region makes them again. By default
/// libgomp lets idle threads spin for milliseconds, on the cores where the runners compute (measured with 1
/// million parameters: 4.1 to 4.6 ms a cycle with spinning threads, 2.5 to 3.1 ms without). Does nothing if
/// the loaded library lacks the call, or inside a parallel region.
void release_idle_threads() noexcept;

/// While an object with `engage` true lives, parallel regions of this thread have one thread. For work that
/// takes less time than making and joining threads. Does nothing if the loaded library lacks the call.
class OneThread : base::Unmovable {
 public:
  explicit OneThread(bool engage) noexcept;
  ~OneThread();

 private:
  int threads_before_ = 0;  ///< 0: nothing to restore.
};

}  // namespace accelmgr::client
