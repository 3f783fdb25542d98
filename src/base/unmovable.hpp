#pragma once

namespace accelmgr::base {

/// Base of what is neither copied nor moved: others refer to it, or its destructor undoes what it has done.
class Unmovable {
 public:
  Unmovable(const Unmovable&) = delete;
  Unmovable& operator=(const Unmovable&) = delete;

 protected:
  Unmovable() = default;
  ~Unmovable() = default;
};

}  // namespace accelmgr::base
