// Waiting for descriptors until a deadline.
#pragma once

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <span>

#include "base/clock.hpp"

namespace accelmgr::ipc {

/// Blocks until one of `entries` has its events, a hang-up or an error. False on the deadline; if that has
/// passed already, after one look. A descriptor of -1 is never ready.
inline bool wait_any(std::span<pollfd> entries, base::Deadline deadline) noexcept {
  for (;;) {
    const auto left_ns = std::max<std::int64_t>(deadline.remaining_ns(), 0);
    const timespec timeout{.tv_sec = left_ns / 1'000'000'000, .tv_nsec = left_ns % 1'000'000'000};
    const int ready = ppoll(entries.data(), entries.size(), &timeout, nullptr);
    if (ready >= 0 || errno != EINTR) return ready > 0;
  }
}

/// Blocks until `fd` has one of `events`, a hang-up or an error, and returns them; 0 on the deadline.
inline short wait_ready(int fd, short events, base::Deadline deadline) noexcept {
  pollfd entry{.fd = fd, .events = events, .revents = 0};
  return wait_any({&entry, 1}, deadline) ? entry.revents : short{0};
}

}  // namespace accelmgr::ipc
