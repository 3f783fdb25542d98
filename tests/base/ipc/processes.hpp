// Child processes for tests: to fork them, to wait for their end, and to check that none is left.
#pragma once

#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "base/ipc/process.hpp"

namespace accelmgr::ipc::test {

/// A deadline that only a failing test reaches: it is later than anything here takes on a loaded machine.
inline base::Deadline soon() { return base::Deadline::in_seconds(20); }

/// Does nothing until it is killed. Ends by itself after 60 s, in case the test does not kill it.
[[noreturn]] inline void hang() {
  alarm(60);
  for (;;) pause();
}

/// Runs `body` in a forked child, which exits with the value that `body` returns.
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

/// Waits until all children of this process have ended, and reaps them. Orphans are among them, because
/// main.cpp asks for that. Fails if a child does not end by itself.
inline void expect_no_process_left() {
  const auto deadline = soon();
  pid_t reaped = 0;
  while (reaped != -1 && !deadline.passed()) {
    reaped = waitpid(-1, nullptr, WNOHANG);
    if (reaped == 0) sched_yield();  // A child may be about to end.
  }
  EXPECT_EQ(reaped, -1) << "a process is left";
}

}  // namespace accelmgr::ipc::test
