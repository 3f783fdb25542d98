// Sockets that a forked child does not get: it would keep them open when this process has died, and nobody
// would see its death. O_CLOEXEC is for children that run another program.
#pragma once

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <mutex>
#include <set>

namespace accelmgr::collective {

class NotInherited {
 public:
  static NotInherited& sockets() {
    static auto* all = new NotInherited;  // Never freed: a fork may come at any time.
    return *all;
  }
  /// Returns `fd`, which may be the -1 of a failure.
  int add(int fd) {
    const std::lock_guard lock(mutex_);
    if (fd >= 0) fds_.insert(fd);
    return fd;
  }
  /// Before it is closed: its number may be another's then.
  void remove(int fd) {
    const std::lock_guard lock(mutex_);
    fds_.erase(fd);
  }

 private:
  NotInherited() {
    pthread_atfork([] { sockets().mutex_.lock(); }, [] { sockets().mutex_.unlock(); },
                   [] { sockets().close_all(); });
  }
  void close_all() {
    for (const int fd : fds_) syscall(SYS_close, fd);
    fds_.clear();
    mutex_.unlock();
  }

  std::mutex mutex_;
  std::set<int> fds_;
};

}  // namespace accelmgr::collective
