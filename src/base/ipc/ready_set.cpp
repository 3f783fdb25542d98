#include "base/ipc/ready_set.hpp"

#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <time.h>

#include <cerrno>

#include "accelmgr/errors.hpp"

namespace accelmgr::ipc {

ReadySet::ReadySet()
    : epoll_(epoll_create1(EPOLL_CLOEXEC)),
      timer_(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
  if (!epoll_) throw SystemError("epoll_create1", errno);
  if (!timer_) throw SystemError("timerfd_create", errno);
  add(timer_.get());
}

void ReadySet::add(int fd) {
  if (fd < 0) return;
  epoll_event event{.events = EPOLLIN, .data = {.fd = fd}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) throw SystemError("epoll_ctl", errno);
}

void ReadySet::remove(int fd) noexcept { epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

void ReadySet::wake_in(std::int64_t ns) noexcept {
  const itimerspec once{.it_interval = {},
                        .it_value = {.tv_sec = ns / 1'000'000'000, .tv_nsec = ns % 1'000'000'000}};
  timerfd_settime(timer_.get(), 0, &once, nullptr);
}

void ReadySet::close() noexcept {
  epoll_.reset();
  timer_.reset();
}

}  // namespace accelmgr::ipc
