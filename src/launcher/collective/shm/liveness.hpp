// Tells which processes of a world have ended.
//
// A process is identified by its pid and its start time: the kernel may give a pid to another process once
// the first is reaped.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "base/unique_fd.hpp"

namespace accelmgr::collective::shm {

/// Low half: pid. High half: the low bits of the start time, in ticks since boot. 0: no process.
using Identity = std::uint64_t;

constexpr pid_t pid_of(Identity identity) noexcept { return static_cast<pid_t>(identity & 0xffffffffu); }

/// Returns 0 when there is no such process or its /proc entry cannot be read.
Identity identity_of(pid_t pid);

/// Thread-safe.
class Liveness {
 public:
  /// Returns true when the process has ended, reaped or not. Always false for the calling process and for 0.
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
