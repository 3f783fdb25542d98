#include "launcher/collective/rendezvous/shared_store.hpp"

#include "accelmgr/communicator.hpp"
#include "base/interruption.hpp"
#include "base/timing.hpp"

namespace accelmgr::collective {

std::string SharedStore::get(const std::string& key, base::Deadline deadline) {
  for (;;) {
    const auto turn_ends =
        base::earlier(deadline, base::Deadline::at_ns(base::now_ns() + timing::store_look_ns));
    try {
      const std::lock_guard lock(mutex_);
      return store_.get(key, turn_ends);
    } catch (const CollectiveError&) {
      if (deadline.passed() || base::interrupted()) throw;
    }
  }
}

}  // namespace accelmgr::collective
