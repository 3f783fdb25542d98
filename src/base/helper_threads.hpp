// Threads that help their owner's thread with work on a lot of memory, which several cores stream faster than
// one.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "base/unmovable.hpp"

namespace accelmgr::base {

/// Used by one thread. They do not outlive a fork.
class Helpers : Unmovable {
 public:
  /// `threads` includes the caller's: 1 starts none. No signal is handled on the others. If the system gives
  /// fewer threads, there are fewer.
  explicit Helpers(int threads);
  ~Helpers();

  /// Calls work(0) to work(count - 1) once each, on the caller's thread and on the others; in any order.
  /// Returns when all have returned. Allocates nothing.
  /// Requires: `work` does not throw.
  template <class Work>
  void for_each(int count, const Work& work) noexcept {
    share({[](const void* context, int index) noexcept { (*static_cast<const Work*>(context))(index); },
           &work, count});
  }

 private:
  struct Job {
    void (*call)(const void* context, int index) noexcept = nullptr;
    const void* context = nullptr;
    int count = 0;
  };
  void share(const Job& job) noexcept;
  void take_part(const Job& job) noexcept;
  void help() noexcept;

  std::mutex mutex_;  ///< Guards the members below, except `next_`.
  std::condition_variable called_, done_;
  Job job_;
  bool open_ = false;  ///< The job has work left to take: a helper that wakes up later has none.
  unsigned jobs_ = 0;  ///< How many jobs there were.
  int busy_ = 0;       ///< Helpers that work on the job now.
  bool ends_ = false;
  std::atomic<int> next_{0};  ///< The index that nobody has taken yet.
  std::vector<std::thread> threads_;
};

}  // namespace accelmgr::base
