// Threads that help the one that they belong to: they share out work on a lot of memory, which one core
// cannot stream as fast as several.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace accelmgr::base {

/// Used by one thread. They do not outlive a fork.
class Helpers {
 public:
  /// So many threads with the caller's: 1 starts none. No signal is handled on them. If the system gives
  /// fewer, there are fewer.
  explicit Helpers(int threads);
  ~Helpers();
  Helpers(const Helpers&) = delete;
  Helpers& operator=(const Helpers&) = delete;

  /// Calls work(0) to work(count - 1) once each, on the caller's thread and on the others; in any order.
  /// Returns when all have returned. They must not throw. Allocates nothing.
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

  std::mutex mutex_;  ///< Of what follows, but `next_`.
  std::condition_variable called_, done_;
  Job job_;
  bool open_ = false;  ///< The job has work left to take: a helper that wakes up later has none.
  unsigned jobs_ = 0;  ///< How many there were.
  int busy_ = 0;       ///< Helpers that take part in it now.
  bool ends_ = false;
  std::atomic<int> next_{0};  ///< The index that nobody has taken yet.
  std::vector<std::thread> threads_;
};

}  // namespace accelmgr::base
