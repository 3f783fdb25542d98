#pragma once

namespace accelmgr::base {

/// Base of what is neither copied nor moved: others refer to it, or its destructor undoes what it has done.
class Unmovable {
 protected:
  Unmovable() = default;
  ~Unmovable() = default;
  Unmovable(const Unmovable&) = delete;
  Unmovable& operator=(const Unmovable&) = delete;
};

}  // namespace accelmgr::base
