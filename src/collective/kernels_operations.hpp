// How two vectors are combined.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

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
/// Of integers `a != a` is never true, and costs nothing.
struct Minimum {
  template <class V>
  ACCELMGR_INLINE static V combine(V a, V b) {
    return ((a < b) | (a != a)) ? a : b;
  }
};
struct Maximum {
  template <class V>
  ACCELMGR_INLINE static V combine(V a, V b) {
    return ((a > b) | (a != a)) ? a : b;
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

/// (a + bi)(c + di) = (ac - bd) + (ad + bc)i, by the definition.
template <class T>
struct ComplexProduct {
  static constexpr std::size_t lanes = lanes_of<T>;
  using Index = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;
  using V = Vector<T, lanes>;
  using I = Vector<Index, lanes>;
  ACCELMGR_INLINE static V combine(V a, V b) {
    I real, imaginary, swapped, odd;
    for (std::size_t i = 0; i < lanes; ++i) {
      real[i] = static_cast<Index>(i & ~std::size_t{1});
      imaginary[i] = static_cast<Index>(i | 1);
      swapped[i] = static_cast<Index>(i ^ 1);
      odd[i] = i % 2 == 1 ? -1 : 0;
    }
    const V left = __builtin_shuffle(a, real) * b;
    const V right = __builtin_shuffle(a, imaginary) * __builtin_shuffle(b, swapped);
    return odd ? left + right : left - right;
  }
};

}  // namespace
}  // namespace accelmgr::collective
