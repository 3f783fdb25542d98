// Several descriptors and a time as one descriptor, for a loop or a wait that knows none of them.
#pragma once

#include <cstdint>

#include "base/unique_fd.hpp"

namespace accelmgr::ipc {

/// Its descriptor is readable while one of the others is readable or has hung up, and when the time has come.
class ReadySet {
 public:
  ReadySet();  ///< Throws SystemError.
  /// Throws SystemError. Does nothing for -1.
  void add(int fd);
  /// Call it before `fd` is closed: a copy of it elsewhere would stay in the set. Does nothing if it is not
  /// in the set.
  void remove(int fd) noexcept;
  /// Replaces the time. 0: none.
  void wake_in(std::int64_t ns) noexcept;

  int descriptor() const noexcept { return epoll_.get(); }
  void close() noexcept;

 private:
  base::UniqueFd epoll_, timer_;
};

}  // namespace accelmgr::ipc
