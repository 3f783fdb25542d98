// While one of these lives, torch keeps its warnings to itself: what it has to say about a store that answers
// late or is gone, with a stack of twenty lines, the caller of ours gets as an exception.
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
