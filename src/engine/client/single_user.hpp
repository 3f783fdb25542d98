// Who may use a handle: one thread at a time, of the process that has made it.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "base/unmovable.hpp"

namespace accelmgr::client {

class SingleUser {
 public:
  /// A call. Throws UsageError, with its name, for a second thread, inside another call, and in a forked
  /// child.
  class Use : base::Unmovable {
   public:
    Use(SingleUser& user, const char* call);
    ~Use() { user_.thread_.store(before_); }

   private:
    SingleUser& user_;
    std::uint64_t before_ = 0;
  };

  /// Whether this process has made this.
  bool is_owner() const noexcept { return getpid() == owner_; }
  // See those of Handle.
  void check_owner(const char* call) const;
  void claim(const char* call);
  void release() noexcept;
  void take_claim() noexcept;

 private:
  pid_t owner_ = getpid();
  /// 0, or the thread that uses this; with a bit if it has claimed it, and another if it is in a call
  /// meanwhile.
  std::atomic<std::uint64_t> thread_{0};
  int claims_ = 0;  ///< Of that thread: claims nest.
};

}  // namespace accelmgr::client
