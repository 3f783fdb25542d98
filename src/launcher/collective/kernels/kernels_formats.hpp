// The formats: how elements lie in memory, and the vector type V in which they are computed. One V holds
// `lanes` elements.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/simd/elements.hpp"
#include "base/simd/vectors.hpp"

namespace accelmgr::collective {
namespace {

using namespace base::simd;

template <class Element>
struct Format {
  static constexpr std::size_t element = sizeof(StoredOf<Element>);
  static constexpr std::size_t lanes = lanes_of<ComputedOf<Element>>;
  using Scalar = ComputedOf<Element>;
  using V = Vector<Scalar, lanes>;
  template <class Access>
  ACCELMGR_INLINE static V load(const char* from, Access access) {
    return load_as<Element, lanes>(from, access);
  }
  template <class Access>
  ACCELMGR_INLINE static void store(char* to, V v, Access access) {
    store_as<Element, lanes>(to, v, access);
  }
};

/// Pairs of a real and an imaginary part, which alternate in V.
template <class T>
struct Complex : Format<Plain<T>> {
  static constexpr std::size_t element = 2 * sizeof(T);
  static constexpr std::size_t lanes = vector_bytes / element;
};

struct Boolean : Format<Plain<std::uint8_t>> {
  template <class Access>
  ACCELMGR_INLINE static V load(const char* from, Access access) {
    return reinterpret_cast<V>(access.template load<V>(from) != 0) & 1;
  }
};

}  // namespace
}  // namespace accelmgr::collective
