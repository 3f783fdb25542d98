// Functions of the benchmark programs: processes that measure together, shared memory for their results, and
// the lines that tools/bench/run reads.
#pragma once

#include <sched.h>
#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace accelmgr::bench {

/// True if `--quick` is the only argument, false if there is none. Other arguments end the program with 2.
bool parse_quick(int argc, char** argv);

/// Prints one line of the contract; see tools/bench/run. `more` has further keys and their numbers.
void emit(const std::string& name, const std::string& in_case, const std::string& metric, double value,
          const std::string& unit, const std::vector<std::pair<std::string, double>>& more = {});

/// `values` must not be empty.
double median(std::vector<double> values);

/// Zeroed memory that this process shares with its forked children. It is never unmapped.
void* shared_memory(std::size_t bytes);
template <class T>
T* share(std::size_t count = 1) {
  return static_cast<T*>(shared_memory(count * sizeof(T)));
}

/// Runs `work` and returns 0. If `work` throws, prints the error on standard error and returns 1.
int exit_code_of(const std::function<void()>& work) noexcept;

/// Forks a process that runs `work` and exits with exit_code_of(work). It is killed when this process ends.
pid_t fork_worker(const std::function<void()>& work);

/// Waits until all workers have ended. If one fails, kills the others, which may wait for it, and throws
/// std::runtime_error.
void wait_workers(const std::vector<pid_t>& workers);

/// Runs `work(i)` for each i below `count`, each in a process of its own, all at the same time.
void run_together(int count, const std::function<void(int)>& work);

/// Pins the calling process to the `index`-th of its cores for the lifetime of the object. Does nothing if
/// the process may use fewer than `among` cores.
class Pin {
 public:
  Pin(int index, int among);
  ~Pin();
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;

 private:
  cpu_set_t before_;
};

/// Waits a moment inside a loop that polls.
inline void relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace accelmgr::bench
