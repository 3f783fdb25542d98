// Runs a process one instruction at a time, and can kill it between any two. The process is a forked child
// under ptrace.
#pragma once

#include <sched.h>
#include <sys/types.h>

#include <cstdint>
#include <functional>

namespace accelmgr::session {

/// Use it only from the thread that made it, as ptrace requires.
class SteppedProcess {
 public:
  /// Forks a child that will run `work` and exit; it stops before `work`. The child shares this process's
  /// shared mappings. The kernel kills it when this process ends. Throws SystemError, with EPERM if the
  /// kernel refuses ptrace.
  explicit SteppedProcess(const std::function<void()>& work);
  ~SteppedProcess() { kill(); }
  SteppedProcess(const SteppedProcess&) = delete;
  SteppedProcess& operator=(const SteppedProcess&) = delete;

  /// Runs one instruction, or one whole reading of the clock. A reading of the clock begins again when the
  /// kernel updates the clock meanwhile, so stepping through it might never end. Returns false if the child
  /// has ended with status 0. Throws std::runtime_error if it ends otherwise or gets a signal.
  bool step();
  /// Runs up to `count` instructions.
  bool step(std::uint64_t count);
  /// Sends SIGKILL and returns when the child has ended.
  void kill() noexcept;

 private:
  int wait();
  bool resume(int request);
  bool reads_the_clock();
  bool finish_reading();

  pid_t pid_ = 0;
};

/// Keeps this process, and the processes that it forks, on one core. Parent and child take turns with every
/// instruction: that is four times as fast when neither has to wake another core.
class OnOneCore {
 public:
  OnOneCore();
  ~OnOneCore();
  OnOneCore(const OnOneCore&) = delete;
  OnOneCore& operator=(const OnOneCore&) = delete;

 private:
  cpu_set_t before_;
};

}  // namespace accelmgr::session
