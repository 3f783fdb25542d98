// While a MutedWarnings exists, torch logs no warnings. torch would log a stack of twenty lines when a store
// answers late or is gone; the caller of accelmgr gets an exception instead.
#pragma once

namespace accelmgr::distributed {

class MutedWarnings {
 public:
  MutedWarnings();
  ~MutedWarnings();
  MutedWarnings(const MutedWarnings&) = delete;
  MutedWarnings& operator=(const MutedWarnings&) = delete;
};

}  // namespace accelmgr::distributed
