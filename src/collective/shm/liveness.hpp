// Which processes of a world are still alive.
//
// A process is known by its pid together with the time it began: a pid alone is another process's as soon as
// the first is reaped.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "base/unique_fd.hpp"

namespace accelmgr::collective::shm {

/// pid, and in the high half the low bits of the time it began, in ticks since boot. 0: none.
using Identity = std::uint64_t;

constexpr pid_t pid_of(Identity identity) noexcept { return static_cast<pid_t>(identity & 0xffffffffu); }

/// 0 when there is no such process, or /proc does not tell.
Identity identity_of(pid_t pid);

/// Thread-safe.
class Liveness {
 public:
  /// True when the process has ended, reaped or not. Never of this process, nor of nobody (0).
  bool has_ended(Identity identity);

 private:
  struct Watched {
    base::UniqueFd pidfd;
    bool ended = false;
  };
  /// Throws SystemError when descriptors are exhausted.
  static Watched watch(Identity identity);

  std::mutex mutex_;
  std::unordered_map<Identity, Watched> watched_;
};

}  // namespace accelmgr::collective::shm
