// A tensor as plain memory: dense, in row-major order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "accelmgr/communicator.hpp"

namespace accelmgr::distributed {

/// The operation with this name: SUM, AVG, PRODUCT, MIN, MAX, AND, OR. Throws UsageError, which lists these.
ReduceOp reduce_op(const std::string& name);

/// The dtype with this torch name. Throws UsageError for dtypes that collectives do not support (quantized,
/// bits, floats of 8 bits or less, complex halves).
DType collective_dtype(std::string_view name);

struct Array {
  const void* data;  ///< May be null if there are no elements.
  DType dtype;
  std::span<const std::int64_t> shape;

  std::size_t count() const noexcept;
};

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
