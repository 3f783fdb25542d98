// A version that is odd while its data are written (a sequence lock): who copies the data looks at the
// version before and afterwards. One process writes; readers write nothing, so an observer can be one.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/fences.hpp"

namespace accelmgr::session {

using Version = std::atomic<std::uint64_t>;

inline bool is_written(const Version& version) noexcept { return version.load() % 2 != 0; }

inline void begin_write(Version& version) noexcept {
  version.fetch_add(1);
  base::release_fence();  // An atomic addition alone does not hold back the stores after it.
}
inline void end_write(Version& version) noexcept { version.fetch_add(1); }

/// A reader calls this when it has made its copy, before it looks at the version again.
inline void end_copy() noexcept { base::acquire_fence(); }

}  // namespace accelmgr::session
