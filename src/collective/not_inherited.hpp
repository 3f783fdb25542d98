// Sockets that are closed in every forked child. A child would keep them open after this process has died, so
// that the peers would not see its death. O_CLOEXEC helps only when the child executes another program.
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
  /// Registers and returns `fd`. -1, the result of a failed call, is returned as it is.
  int add(int fd) {
    const std::lock_guard lock(mutex_);
    if (fd >= 0) fds_.insert(fd);
    return fd;
  }
  /// Must be called before `fd` is closed: afterwards the number may name another file.
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
