// What the collectives of arrays pass to a communicator.
#pragma once

#include "distributed/arrays.hpp"

namespace accelmgr::distributed {

/// The shape, which the members compare. A 0-d tensor gets an empty span with a pointer, because a null span
/// means that the shape is unknown.
inline CallOptions options_for(const Array& array) {
  static constexpr std::int64_t of_0_d = 0;
  return {.shape = array.shape.empty() ? std::span(&of_0_d, 0) : array.shape};
}

/// The size of one of `blocks` blocks of dimension 0. If dimension 0 is not a multiple of `blocks`, the
/// collective is still made, with 0 elements, so that no member waits: either the members find that their
/// shapes differ, or check() throws on all of them.
class Blocks {
 public:
  Blocks(const Array& array, int blocks)
      : even_(!array.shape.empty() && array.shape[0] % blocks == 0),
        count_(even_ ? array.count() / static_cast<std::size_t>(blocks) : 0),
        blocks_(blocks) {}
  std::size_t count() const noexcept { return count_; }
  /// Throws UsageError.
  void check(const Array& array, const char* call) const;

 private:
  bool even_;
  std::size_t count_;
  int blocks_;
};

}  // namespace accelmgr::distributed
