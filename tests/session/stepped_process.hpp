// A process that is run one instruction at a time, and can be killed between any two: a forked child under
// ptrace.
#pragma once

#include <sched.h>
#include <sys/types.h>

#include <cstdint>
#include <functional>

namespace accelmgr::session {

/// Used by the thread that made it: ptrace knows no other.
class SteppedProcess {
 public:
  /// Forks a child that will run `work` and exit; it stands before it. The child has this process's shared
  /// mappings, and is killed when this process ends. Throws SystemError; when the kernel refuses ptrace, with
  /// EPERM.
  explicit SteppedProcess(const std::function<void()>& work);
  ~SteppedProcess() { kill(); }
  SteppedProcess(const SteppedProcess&) = delete;
  SteppedProcess& operator=(const SteppedProcess&) = delete;

  /// One instruction, or a reading of the clock: that begins again when the kernel sets the clock meanwhile,
  /// so one instruction at a time it may never come to its end. False when the child has ended, with status
  /// 0. Throws std::runtime_error when it ends otherwise, or meets a signal.
  bool step();
  /// Up to `count` instructions.
  bool step(std::uint64_t count);
  /// SIGKILL; returns when the child is gone.
  void kill() noexcept;

 private:
  int wait();
  bool resume(int request);
  bool reads_the_clock();
  bool finish_reading();

  pid_t pid_ = 0;
};

/// Keeps this process, and those it forks, on one core: stepping is a dialogue of two processes, four times
/// as fast when neither has to wake another core.
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
