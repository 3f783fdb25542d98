// What kernels are written with: vector types of the compiler, loads and stores, and the walk over a range.
//
// Only the variants of kernels may include this, each compiled for its instruction set
// (base/simd/variants.hpp). All names are local to the including file: of an inline function that is shared
// with other code, the linker could keep the AVX-512 form, and all code would call it.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define ACCELMGR_INLINE __attribute__((always_inline)) inline

namespace accelmgr::base::simd {
namespace {

#if defined(__AVX512F__)
constexpr std::size_t vector_bytes = 64;
#elif defined(__AVX2__)
constexpr std::size_t vector_bytes = 32;
#else
constexpr std::size_t vector_bytes = 16;
#endif
/// Number of vectors in a block of walk().
constexpr std::size_t unroll = 4;

template <class T, std::size_t lanes>
struct VectorOf {
  using type [[gnu::vector_size(lanes * sizeof(T))]] = T;
};
template <class T, std::size_t lanes>
using Vector = typename VectorOf<T, lanes>::type;

/// How many elements fill a register.
template <class T>
constexpr std::size_t lanes_of = vector_bytes / sizeof(T);

/// A vector narrower than any register is stored regularly.
/// Requires: `to` is aligned to the vector.
template <class V>
ACCELMGR_INLINE void store_past_caches(void* to, V v) {
  [[maybe_unused]] auto* bytes = static_cast<char*>(to);
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64)
    return _mm512_stream_si512(reinterpret_cast<__m512i*>(bytes), reinterpret_cast<__m512i>(v));
#endif
#if defined(__AVX__)
  if constexpr (sizeof(V) == 32)
    return _mm256_stream_si256(reinterpret_cast<__m256i*>(bytes), reinterpret_cast<__m256i>(v));
#endif
#if defined(__SSE2__)
  if constexpr (sizeof(V) == 16)
    return _mm_stream_si128(reinterpret_cast<__m128i*>(bytes), reinterpret_cast<__m128i>(v));
#endif
  std::memcpy(to, &v, sizeof v);
}

ACCELMGR_INLINE void fence_past_caches() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

/// The square root of each lane of a vector that fills a register.
template <class V>
ACCELMGR_INLINE V square_roots(V v) {
  [[maybe_unused]] constexpr bool is_single = sizeof(v[0]) == sizeof(float);
#if defined(__AVX512F__)
  if constexpr (is_single) return reinterpret_cast<V>(_mm512_sqrt_ps(reinterpret_cast<__m512>(v)));
  return reinterpret_cast<V>(_mm512_sqrt_pd(reinterpret_cast<__m512d>(v)));
#elif defined(__AVX__)
  if constexpr (is_single) return reinterpret_cast<V>(_mm256_sqrt_ps(reinterpret_cast<__m256>(v)));
  return reinterpret_cast<V>(_mm256_sqrt_pd(reinterpret_cast<__m256d>(v)));
#elif defined(__SSE2__)
  if constexpr (is_single) return reinterpret_cast<V>(_mm_sqrt_ps(reinterpret_cast<__m128>(v)));
  return reinterpret_cast<V>(_mm_sqrt_pd(reinterpret_cast<__m128d>(v)));
#elif defined(__aarch64__)
  if constexpr (is_single) return reinterpret_cast<V>(vsqrtq_f32(reinterpret_cast<float32x4_t>(v)));
  return reinterpret_cast<V>(vsqrtq_f64(reinterpret_cast<float64x2_t>(v)));
#else
  for (std::size_t lane = 0; lane < sizeof v / sizeof(v[0]); ++lane) v[lane] = std::sqrt(v[lane]);
  return v;
#endif
}

// How a vector is loaded and stored: whole, whole past the caches, or in part.
struct Whole {
  template <class V>
  ACCELMGR_INLINE static V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
  }
  template <class V>
  ACCELMGR_INLINE static void store(void* to, V v) {
    std::memcpy(to, &v, sizeof v);
  }
};
struct WholePastCaches : Whole {
  template <class V>
  ACCELMGR_INLINE static void store(void* to, V v) {
    store_past_caches(to, v);
  }
};
/// Only the first `count` of the `elements` of a vector. Loads set the rest to zero.
template <std::size_t elements>
struct Partial {
  std::size_t count;
  template <class V>
  ACCELMGR_INLINE V load(const void* from) const {
    V v{};
    std::memcpy(&v, from, count * (sizeof v / elements));
    return v;
  }
  template <class V>
  ACCELMGR_INLINE void store(void* to, V v) const {
    std::memcpy(to, &v, count * (sizeof v / elements));
  }
};

/// Calls step(offset in elements, vectors, access) over `count` elements. A vector has `lanes` elements.
/// First for blocks of `unroll` vectors, then for single vectors, then for a partial one: every element gets
/// the same operations at any position. `vectors` is an integral constant.
///
/// `element` is the size in bytes of an element at the destination. Stores past the caches need an aligned
/// destination: a partial step at the beginning aligns it. A destination that cannot be aligned is written
/// regularly. A fence follows stores past the caches.
template <std::size_t element, std::size_t lanes, bool past_caches, class Step>
ACCELMGR_INLINE void walk(const void* destination, std::size_t count, Step step) {
  using Access = std::conditional_t<past_caches, WholePastCaches, Whole>;
  constexpr std::integral_constant<std::size_t, unroll> block{};
  constexpr std::integral_constant<std::size_t, 1> one{};
  std::size_t at = 0;
  if constexpr (past_caches) {
    constexpr std::size_t whole = element * lanes;
    const auto misaligned = reinterpret_cast<std::uintptr_t>(destination) % whole;
    if (misaligned % element != 0) return walk<element, lanes, false>(destination, count, step);
    if (misaligned != 0) {
      const std::size_t head = (whole - misaligned) / element;
      at = head < count ? head : count;
      step(std::size_t{0}, one, Partial<lanes>{at});
    }
  }
  for (; count - at >= unroll * lanes; at += unroll * lanes) step(at, block, Access{});
  for (; count - at >= lanes; at += lanes) step(at, one, Access{});
  if (at < count) step(at, one, Partial<lanes>{count - at});
  if constexpr (past_caches) fence_past_caches();
}

}  // namespace
}  // namespace accelmgr::base::simd
