// Processes of the tests.
#pragma once

#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "ipc/process.hpp"

namespace accelmgr::ipc::test {

/// More than anything here takes on a loaded machine; reached only by a test that fails.
inline base::Deadline soon() { return base::Deadline::in_seconds(20); }

/// Does nothing until it is killed; not for ever, should the test that kills it fail.
[[noreturn]] inline void hang() {
  alarm(60);
  for (;;) pause();
}

/// Runs `body` in a forked child; what it returns is the exit code.
template <class Body>
Child fork_child(Body&& body) {
  Child child;
  child.pid = fork();
  if (child.pid == 0) _exit(std::forward<Body>(body)());
  child.pidfd = open_pidfd(child.pid);
  return child;
}

/// Waits for the end of a child of this process, reaps it, and says how it ended.
inline std::string end_of(const Child& child) {
  if (!wait_ended(child.pidfd.get(), soon())) {
    send_signal(child.pidfd.get(), SIGKILL);
    ADD_FAILURE() << "process " << child.pid << " did not end by itself";
  }
  int status = -1;
  EXPECT_EQ(waitpid(child.pid, &status, 0), child.pid);
  return describe_exit(status);
}

/// Orphans become children of this process (main() asks for it): reaps all; fails if one does not end by
/// itself.
inline void expect_no_process_left() {
  const auto deadline = soon();
  pid_t reaped = 0;
  while (reaped != -1 && !deadline.passed()) {
    reaped = waitpid(-1, nullptr, WNOHANG);
    if (reaped == 0) sched_yield();  // It may be on its way out.
  }
  EXPECT_EQ(reaped, -1) << "a process is left";
}

}  // namespace accelmgr::ipc::test
