// Singletons that are not shared with forked processes. A forked process makes a new object: the parent's
// copy may be half changed, and its mutex may be locked by a thread that does not exist in the child.
#pragma once

#include <unistd.h>

#include <atomic>
#include <memory>

namespace accelmgr::ipc {

/// The object of this process. The first call makes it; it is never deleted. Any thread may call.
template <class Object>
Object& process_local() {
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

}  // namespace accelmgr::ipc
