// What the benchmark programs share: processes that measure together, memory for their results, and the lines
// that tools/bench/run reads.
#pragma once

#include <sched.h>
#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace accelmgr::bench {

/// Whether `--quick` is the only argument. Ends the program with 2 when there is any other.
bool parse_quick(int argc, char** argv);

/// Prints one line of the contract. `more`: further keys and their numbers.
void emit(const std::string& name, const std::string& in_case, const std::string& metric, double value,
          const std::string& unit, const std::vector<std::pair<std::string, double>>& more = {});

/// Of a list that is not empty.
double median(std::vector<double> values);

/// Zeroed memory that this process and those it forks share, as long as the process lives.
void* shared_memory(std::size_t bytes);
template <class T>
T* share(std::size_t count = 1) {
  return static_cast<T*>(shared_memory(count * sizeof(T)));
}

/// Runs `work`: 0, or 1 and the error's text on standard error if it throws.
int exit_code_of(const std::function<void()>& work) noexcept;

/// Forks a process that runs `work` and ends with its exit code. It is killed when this process ends.
pid_t fork_worker(const std::function<void()>& work);

/// Waits until all have ended. Throws std::runtime_error when one failed, and kills the others then: they may
/// wait for it.
void wait_workers(const std::vector<pid_t>& workers);

/// `work(i)` in `count` processes at a time.
void run_together(int count, const std::function<void(int)>& work);

/// Keeps the calling process on the `index`-th of the cores it may use, if there are `among` of them.
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
