// Children of user code that do nothing until they are killed.
#pragma once

#include <sys/types.h>

#include <deque>

namespace accelmgr::test {

class LivingChildren {
 public:
  LivingChildren() = default;
  LivingChildren(const LivingChildren&) = delete;
  LivingChildren& operator=(const LivingChildren&) = delete;
  /// Kills them. Those of a process that is killed live on.
  ~LivingChildren() {
    while (!pids_.empty()) end_oldest();
  }

  /// In turn a fork of this process, which holds all of its descriptors, and a program that is executed with
  /// an empty environment. Kills the oldest if there are four. Throws SystemError.
  void add();

 private:
  void end_oldest() noexcept;

  std::deque<pid_t> pids_;
  int added_ = 0;
};

}  // namespace accelmgr::test
