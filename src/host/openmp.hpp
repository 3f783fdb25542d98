// The host's OpenMP threads, which torch's operators leave behind.
#pragma once

namespace accelmgr::host {

/// Ends the idle threads of this thread's OpenMP pool; its next parallel region makes them anew. libgomp lets
/// idle threads spin for milliseconds by default, on the cores where the runners are to compute (measured at
/// 1 million parameters: a cycle of 4.1 to 4.6 ms, against 2.5 to 3.1). Does nothing where the library loaded
/// has no such call, or inside a parallel region.
void release_idle_threads() noexcept;

/// While it lives, and was made to `engage`, parallel regions of this thread have no other thread. For work
/// that is done sooner than threads are made and met. Does nothing where the library loaded has no such call.
class OneThread {
 public:
  explicit OneThread(bool engage) noexcept;
  ~OneThread();
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int threads_before_ = 0;  ///< 0: there is nothing to restore.
};

}  // namespace accelmgr::host
