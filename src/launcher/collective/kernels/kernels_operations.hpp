// The operations: each combines two vectors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "base/simd/vectors.hpp"

namespace accelmgr::collective {
namespace {

using namespace base::simd;

struct Sum {
  template <class V>
  ACCELMGR_INLINE static V combine(V a, V b) {
    return a + b;
  }
};
struct Average : Sum {};
struct Product {
  template <class V>
  ACCELMGR_INLINE static V combine(V a, V b) {
    return a * b;
  }
};
/// NaN in either operand gives NaN. For integers `a != a` is never true and costs nothing.
struct Minimum {
  template <class V>
  ACCELMGR_INLINE static V combine(V a, V b) {
    return ((a < b) | (a != a)) ? a : b;  // NOLINT(misc-redundant-expression): the test for NaN.
  }
};
struct Maximum {
  template <class V>
  ACCELMGR_INLINE static V combine(V a, V b) {
    return ((a > b) | (a != a)) ? a : b;  // NOLINT(misc-redundant-expression): the test for NaN.
  }
};
struct And {
  template <class V>
  ACCELMGR_INLINE static V combine(V a, V b) {
    return a & b;
  }
};
struct Or {
  template <class V>
  ACCELMGR_INLINE static V combine(V a, V b) {
    return a | b;
  }
};

/// (a + bi)(c + di) = (ac - bd) + (ad + bc)i, without special handling of infinities.
template <class T>
struct ComplexProduct {
  static constexpr std::size_t lanes = lanes_of<T>;
  using Index = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;
  using V = Vector<T, lanes>;
  using I = Vector<Index, lanes>;
  ACCELMGR_INLINE static V combine(V a, V b) { return combine(a, b, std::make_index_sequence<lanes>()); }

 private:
  template <std::size_t... i>
  ACCELMGR_INLINE static V combine(V a, V b, std::index_sequence<i...>) {
    const V real = __builtin_shufflevector(a, a, (i & ~std::size_t{1})...);
    const V imaginary = __builtin_shufflevector(a, a, (i | 1)...);
    const V swapped = __builtin_shufflevector(b, b, (i ^ 1)...);
    const V left = real * b, right = imaginary * swapped;
    const I odd = {(i % 2 == 1 ? -1 : 0)...};
    return odd ? left + right : left - right;
  }
};

}  // namespace
}  // namespace accelmgr::collective
