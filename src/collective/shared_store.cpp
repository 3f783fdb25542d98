#include "collective/shared_store.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

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

std::vector<std::string> exchange_values(SharedStore& store, const std::string& prefix, int rank,
                                         const std::vector<int>& ranks, const std::string& value,
                                         double timeout_s, base::Deadline deadline) {
  const auto key_of = [&](std::size_t i) { return fmt::format("{}/{}", prefix, i); };
  store.set(key_of(static_cast<std::size_t>(rank)), value);
  std::vector<std::string> values(ranks.size());
  std::vector<int> missing;
  std::string why;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    try {
      // After the deadline it only looks.
      if (missing.empty() || store.has(key_of(i)))
        values[i] = store.get(key_of(i), deadline);
      else
        missing.push_back(ranks[i]);
    } catch (const CollectiveError& late) {
      missing.push_back(ranks[i]);
      why = late.what();
    }
  }
  if (!missing.empty()) {
    const auto text =
        fmt::format("rank{} {} did not come to the rendezvous '{}' within {:g} s ({})",
                    missing.size() == 1 ? "" : "s", fmt::join(missing, ", "), prefix, timeout_s, why);
    throw CollectiveError(text, CollectiveError::Cause::timeout, std::move(missing));
  }
  return values;
}

}  // namespace accelmgr::collective
