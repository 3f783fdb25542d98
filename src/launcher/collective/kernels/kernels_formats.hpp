// The formats: how elements lie in memory, and the vector type V in which they are computed. One V holds
// `lanes` elements.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/simd/half_precision.hpp"
#include "base/simd/vectors.hpp"

namespace accelmgr::collective {
namespace {

using namespace base::simd;

/// Elements that are computed in the type in which they are stored.
template <class T>
struct Plain {
  static constexpr std::size_t element = sizeof(T);
  static constexpr std::size_t lanes = lanes_of<T>;
  using Scalar = T;
  using V = Vector<T, lanes>;
  template <class Access>
  ACCELMGR_INLINE static V load(const char* from, Access access) {
    return access.template load<V>(from);
  }
  template <class Access>
  ACCELMGR_INLINE static void store(char* to, V v, Access access) {
    access.store(to, v);
  }
};

/// Pairs of a real and an imaginary part, which alternate in V.
template <class T>
struct Complex : Plain<T> {
  static constexpr std::size_t element = 2 * sizeof(T);
  static constexpr std::size_t lanes = vector_bytes / element;
};

struct Boolean : Plain<std::uint8_t> {
  template <class Access>
  ACCELMGR_INLINE static V load(const char* from, Access access) {
    return reinterpret_cast<V>(access.template load<V>(from) != 0) & 1;
  }
};

template <Floats (*widen)(Halves), Halves (*narrow)(Floats)>
struct Half {
  static constexpr std::size_t element = 2;
  static constexpr std::size_t lanes = float_lanes;
  using Scalar = float;
  using V = Floats;
  template <class Access>
  ACCELMGR_INLINE static V load(const char* from, Access access) {
    return widen(access.template load<Halves>(from));
  }
  template <class Access>
  ACCELMGR_INLINE static void store(char* to, V v, Access access) {
    access.store(to, narrow(v));
  }
};
using Float16 = Half<widen_float16, narrow_float16>;
using BFloat16 = Half<widen_bfloat16<float_lanes>, narrow_bfloat16<float_lanes>>;

}  // namespace
}  // namespace accelmgr::collective
