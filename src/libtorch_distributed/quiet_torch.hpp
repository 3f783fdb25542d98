// While a QuietTorch exists, torch logs no warnings. torch would log a stack of twenty lines when a store
// answers late or is gone; the caller of accelmgr gets an exception instead.
#pragma once

namespace accelmgr::distributed {

class QuietTorch {
 public:
  QuietTorch();
  ~QuietTorch();
  QuietTorch(const QuietTorch&) = delete;
  QuietTorch& operator=(const QuietTorch&) = delete;
};

}  // namespace accelmgr::distributed
