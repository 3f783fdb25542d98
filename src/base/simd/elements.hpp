// The element types of kernels: how a number is stored, the type in which it is computed, and the conversions
// between the two. float16 and bfloat16 are computed as float32, and rounded to nearest even when they are
// stored. All names are local to the including file, for the reason given in base/simd/vectors.hpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/simd/half_precision.hpp"
#include "base/simd/vectors.hpp"

namespace accelmgr::base::simd {
namespace {

/// Numbers that are computed in the type in which they are stored.
template <class T>
struct Plain {
  using Stored = T;
  using Computed = T;
  template <std::size_t lanes>
  ACCELMGR_INLINE static Vector<T, lanes> widen(Vector<T, lanes> v) {
    return v;
  }
  template <std::size_t lanes>
  ACCELMGR_INLINE static Vector<T, lanes> narrow(Vector<T, lanes> v) {
    return v;
  }
};
using f32 = Plain<float>;
using f64 = Plain<double>;

struct bf16 {
  using Stored = std::uint16_t;
  using Computed = float;
  template <std::size_t lanes>
  ACCELMGR_INLINE static FloatsOf<lanes> widen(HalvesOf<lanes> v) {
    return widen_bfloat16<lanes>(v);
  }
  template <std::size_t lanes>
  ACCELMGR_INLINE static HalvesOf<lanes> narrow(FloatsOf<lanes> v) {
    return narrow_bfloat16<lanes>(v);
  }
};

struct f16 {
  using Stored = std::uint16_t;
  using Computed = float;
  template <std::size_t lanes>
  ACCELMGR_INLINE static FloatsOf<lanes> widen(HalvesOf<lanes> v) {
    static_assert(lanes == float_lanes);
    return widen_float16(v);
  }
  template <std::size_t lanes>
  ACCELMGR_INLINE static HalvesOf<lanes> narrow(FloatsOf<lanes> v) {
    static_assert(lanes == float_lanes);
    return narrow_float16(v);
  }
};

template <class Element>
using StoredOf = typename Element::Stored;
template <class Element>
using ComputedOf = typename Element::Computed;

/// Loads one vector, converted to the type in which it is computed.
template <class Element, std::size_t lanes, class Access>
ACCELMGR_INLINE Vector<ComputedOf<Element>, lanes> load_as(const void* from, Access access) {
  return Element::template widen<lanes>(access.template load<Vector<StoredOf<Element>, lanes>>(from));
}

/// Stores one vector, converted to the type in which it is stored.
template <class Element, std::size_t lanes, class Access>
ACCELMGR_INLINE void store_as(void* to, Vector<ComputedOf<Element>, lanes> v, Access access) {
  access.store(to, Element::template narrow<lanes>(v));
}

/// Copies `count` numbers as elements of another type, which is computed in the same type. `to` and `from`
/// must be the same address or not overlap.
template <class From, class To, bool past_caches>
void convert(void* to, const void* from, std::size_t count) noexcept {
  constexpr std::size_t lanes = lanes_of<ComputedOf<To>>;
  auto* out = static_cast<StoredOf<To>*>(to);
  const auto* in = static_cast<const StoredOf<From>*>(from);
  walk<sizeof(StoredOf<To>), lanes, past_caches>(
      to, count, [&](std::size_t at, auto vectors, auto access) __attribute__((always_inline)) {
        for (std::size_t v = 0; v < vectors; ++v) {
          const std::size_t here = at + v * lanes;
          store_as<To, lanes>(out + here, load_as<From, lanes>(in + here, access), access);
        }
      });
}

}  // namespace
}  // namespace accelmgr::base::simd
