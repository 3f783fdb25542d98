// Sockets that a forked child does not get: it would keep them open when this process has died, and nobody
// would see its death. O_CLOEXEC is for children that run another program.
#pragma once

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <mutex>
#include <set>
#include <utility>

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
  /// Before it is closed: its number may be another's then, as it is in a forked child already. Returns
  /// whether it is still the one that was added.
  bool remove(int fd) {
    const std::lock_guard lock(mutex_);
    return fds_.erase(fd) != 0;
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

/// Owns one of them; in a forked child, nothing.
class OwnSocket {
 public:
  OwnSocket() = default;
  explicit OwnSocket(int fd) : fd_(NotInherited::sockets().add(fd)) {}
  OwnSocket(OwnSocket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  OwnSocket& operator=(OwnSocket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~OwnSocket() {
    if (fd_ >= 0 && NotInherited::sockets().remove(fd_)) ::close(fd_);
  }
  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

}  // namespace accelmgr::collective
