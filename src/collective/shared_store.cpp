#include "collective/shared_store.hpp"

#include <algorithm>

#include "accelmgr/communicator.hpp"
#include "base/interruption.hpp"

namespace accelmgr::collective {
namespace {

constexpr std::int64_t turn_ns = 200'000'000;

}  // namespace

std::string SharedStore::get(const std::string& key, base::Deadline deadline) {
  for (;;) {
    const auto turn_ends = base::Deadline::at_ns(std::min(deadline.ns(), base::now_ns() + turn_ns));
    try {
      const std::lock_guard lock(mutex_);
      return store_.get(key, turn_ends);
    } catch (const CollectiveError&) {
      if (deadline.passed() || base::interrupted()) throw;
    }
  }
}

}  // namespace accelmgr::collective
