// Waiting for one descriptor until a deadline.
#pragma once

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "base/clock.hpp"

namespace accelmgr::ipc {

/// Blocks until `fd` has one of `events`, a hang-up or an error, and returns them; 0 on the deadline. If the
/// deadline has passed already, it looks once and does not block. A descriptor of -1 is never ready.
inline short wait_ready(int fd, short events, base::Deadline deadline) noexcept {
  pollfd entry{.fd = fd, .events = events, .revents = 0};
  for (;;) {
    const auto left_ns = std::max<std::int64_t>(deadline.remaining_ns(), 0);
    const timespec timeout{.tv_sec = left_ns / 1'000'000'000, .tv_nsec = left_ns % 1'000'000'000};
    const int ready = ppoll(&entry, 1, &timeout, nullptr);
    if (ready > 0) return entry.revents;
    if (ready == 0 || errno != EINTR) return 0;
  }
}

}  // namespace accelmgr::ipc
