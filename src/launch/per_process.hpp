// What a process has one of, and a process forked from it another: the parent's copy may be in any state, and
// its lock may be held by a thread that is not there.
#pragma once

#include <unistd.h>

#include <atomic>
#include <memory>

namespace accelmgr::launch {

/// Made at the first call; never deleted.
template <class Object>
Object& of_this_process() {
  struct Owned {
    pid_t owner = getpid();
    Object object;
  };
  static std::atomic<Owned*> current{nullptr};
  auto* found = current.load();
  while (found == nullptr || found->owner != getpid()) {
    auto made = std::make_unique<Owned>();
    if (current.compare_exchange_strong(found, made.get())) return made.release()->object;
  }
  return found->object;
}

}  // namespace accelmgr::launch
