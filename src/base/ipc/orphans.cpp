#include "base/ipc/orphans.hpp"

#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>

#include "accelmgr/errors.hpp"
#include "base/ipc/process.hpp"
#include "base/timing.hpp"

namespace accelmgr::ipc {
namespace {

sigset_t child_ended() noexcept {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  return set;
}

}  // namespace

Orphans::Orphans() {
  const auto set = child_ended();
  ended_.reset(signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!ended_) throw SystemError("signalfd of SIGCHLD", errno);
  sigprocmask(SIG_BLOCK, &set, &mask_before_);
  prctl(PR_SET_CHILD_SUBREAPER, 1);
}

Orphans::~Orphans() { sigprocmask(SIG_SETMASK, &mask_before_, nullptr); }

void Orphans::reap_ended(const std::function<bool(pid_t)>& is_own) noexcept {
  for (signalfd_siginfo told; read(ended_.get(), &told, sizeof told) > 0;) {
  }
  for (;;) {
    siginfo_t info{};
    if (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) return;
    if (is_own(info.si_pid)) return;
    waitpid(info.si_pid, nullptr, 0);
  }
}

bool Orphans::end_all(base::Deadline deadline) noexcept {
  // This process adopts the children of a killed child when the kernel reports the child's end (SIGCHLD):
  // look again after each.
  const auto set = child_ended();
  const pid_t own_session = getsid(0);
  do {
    for (const pid_t pid : children()) {
      kill(pid, SIGKILL);
      // Processes that fork and end are gone before they are found, but their group is not. Where the session
      // is not this one, descendants of this process have made it, and the group.
      const pid_t session = getsid(pid), group = getpgid(pid);
      if (session > 1 && session != own_session && group > 1) kill(-group, SIGKILL);
    }
    pid_t reaped = 0;
    while ((reaped = waitpid(-1, nullptr, WNOHANG | __WALL)) > 0) {
    }
    if (reaped != 0) return true;  // There is no child.
    const timespec slice{.tv_sec = 0, .tv_nsec = static_cast<long>(timing::look_s * 1e9)};
    sigtimedwait(&set, nullptr, &slice);
  } while (!deadline.passed());
  return false;
}

}  // namespace accelmgr::ipc
