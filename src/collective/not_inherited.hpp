// Sockets that are closed in every forked child. A child would keep them open after this process has died, so
// that the peers would not see its death. O_CLOEXEC helps only when the child executes another program.
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
  /// Registers and returns `fd`. -1, the result of a failed call, is returned as it is.
  int add(int fd) {
    const std::lock_guard lock(mutex_);
    if (fd >= 0) fds_.insert(fd);
    return fd;
  }
  /// Must be called before `fd` is closed: afterwards the number may name another file. Returns false if `fd`
  /// is not registered, as in a forked child, where it is closed already.
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

/// Owns such a socket. In a forked child it owns nothing.
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
