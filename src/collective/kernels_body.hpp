// The kernels, written once over the compiler's vector types. Each variant (kernels_portable.cpp,
// kernels_avx2.cpp, kernels_avx512.cpp) includes this file once, compiled for its instruction set; all names
// are local to it.
//
// A range is walked in blocks of `unroll` vectors, then in single vectors, then in one partial vector through
// a zeroed register image: so every element meets the same operations, wherever it lies.
//
// A kernel is a Format (how elements lie in memory, and what they are computed in) and an operation on its
// vectors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "collective/kernels_table.hpp"

namespace accelmgr::collective {
namespace {

#if defined(__AVX512F__)
constexpr std::size_t vector_bytes = 64;
#elif defined(__AVX2__)
constexpr std::size_t vector_bytes = 32;
#else
constexpr std::size_t vector_bytes = 16;
#endif
constexpr std::size_t unroll = 4;

#define ACCELMGR_INLINE __attribute__((always_inline)) inline

template <class T, std::size_t lanes>
struct VectorOf {
  typedef T type [[gnu::vector_size(lanes * sizeof(T))]];
};
template <class T, std::size_t lanes>
using Vector = typename VectorOf<T, lanes>::type;

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

// How a vector meets memory.
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
struct Partial {
  std::size_t bytes;  ///< Of the vector, from its begin.
  template <class V>
  ACCELMGR_INLINE V load(const void* from) const {
    V v{};
    std::memcpy(&v, from, bytes);
    return v;
  }
  template <class V>
  ACCELMGR_INLINE void store(void* to, V v) const {
    std::memcpy(to, &v, bytes);
  }
};

/// Calls step(offset in bytes, vectors, access) over `count` elements of `element` bytes, `lanes` of which
/// fill a vector in memory; `vectors` is an integral constant. Stores past the caches need an aligned
/// destination, which a partial step at the beginning provides; one that cannot be aligned is written
/// regularly.
template <std::size_t element, std::size_t lanes, bool past_caches, class Step>
ACCELMGR_INLINE void walk(const void* destination, std::size_t count, Step step) {
  using Access = std::conditional_t<past_caches, WholePastCaches, Whole>;
  constexpr std::size_t whole = element * lanes;
  constexpr std::integral_constant<std::size_t, 1> one{};
  const std::size_t bytes = count * element;
  std::size_t at = 0;
  if constexpr (past_caches) {
    const auto misaligned = reinterpret_cast<std::uintptr_t>(destination) % whole;
    if (misaligned % element != 0) return walk<element, lanes, false>(destination, count, step);
    if (misaligned != 0) {
      const std::size_t head = whole - misaligned;
      at = head < bytes ? head : bytes;
      step(std::size_t{0}, one, Partial{at});
    }
  }
  for (; bytes - at >= unroll * whole; at += unroll * whole)
    step(at, std::integral_constant<std::size_t, unroll>{}, Access{});
  for (; bytes - at >= whole; at += whole) step(at, one, Access{});
  if (at < bytes) step(at, one, Partial{bytes - at});
  if constexpr (past_caches) fence_past_caches();
}

// ---- conversions of the two halves ----

constexpr std::size_t float_lanes = vector_bytes / sizeof(float);
using Floats = Vector<float, float_lanes>;
using Words = Vector<std::uint32_t, float_lanes>;
using SignedWords = Vector<std::int32_t, float_lanes>;
using Halves = Vector<std::uint16_t, float_lanes>;

ACCELMGR_INLINE Words mask_of(SignedWords comparison) { return reinterpret_cast<Words>(comparison); }
ACCELMGR_INLINE Words choose(Words mask, Words yes, Words no) { return (mask & yes) | (~mask & no); }

ACCELMGR_INLINE Floats widen_bfloat16(Halves v) {
  return reinterpret_cast<Floats>(__builtin_convertvector(v, Words) << 16);
}

/// To nearest even. A NaN keeps its sign and high bits and is made quiet: rounding could carry it into
/// infinity.
ACCELMGR_INLINE Halves narrow_bfloat16(Floats v) {
  const Words bits = reinterpret_cast<Words>(v);
  const Words high = bits >> 16;
  const Words rounded = (bits + 0x7fffu + (high & 1u)) >> 16;
  const Words nan = mask_of(reinterpret_cast<SignedWords>(bits & 0x7fffffffu) > 0x7f800000);
  return __builtin_convertvector(choose(nan, high | 0x40u, rounded), Halves);
}

#if defined(__AVX512F__)
// The forms without a mask are inline functions of g++ 12 that it warns about (GCC bug 105593).
constexpr __mmask16 all_lanes = 0xffff;
#endif

/// The exponent moves by 112; those of infinity and NaN by as much again; a subnormal is its fraction over a
/// power of two that is subtracted again.
ACCELMGR_INLINE Floats widen_float16(Halves v) {
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(_mm512_maskz_cvtph_ps(all_lanes, reinterpret_cast<__m256i>(v)));
#elif defined(__F16C__)
  return reinterpret_cast<Floats>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(v)));
#else
  const Words half = __builtin_convertvector(v, Words);
  const Words exponent = (half & 0x7c00u) << 13;
  const Words moved = ((half & 0x7fffu) << 13) + (112u << 23);
  const Words special = moved + (112u << 23);
  const Words one_up = moved + (1u << 23);
  const Words base = Words{} + (113u << 23);
  const Words subnormal =
      reinterpret_cast<Words>(reinterpret_cast<Floats>(one_up) - reinterpret_cast<Floats>(base));
  const Words finite = choose(mask_of(reinterpret_cast<SignedWords>(exponent) == 0), subnormal, moved);
  const Words magnitude =
      choose(mask_of(reinterpret_cast<SignedWords>(exponent) == 0x7c00 << 13), special, finite);
  return reinterpret_cast<Floats>(magnitude | (half & 0x8000u) << 16);
#endif
}

/// To nearest even; beyond the largest: infinity.
ACCELMGR_INLINE Halves narrow_float16(Floats v) {
#if defined(__AVX512F__)
  return reinterpret_cast<Halves>(_mm512_maskz_cvtps_ph(all_lanes, reinterpret_cast<__m512>(v),
                                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
  return reinterpret_cast<Halves>(
      _mm256_cvtps_ph(reinterpret_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  const Words bits = reinterpret_cast<Words>(v);
  const Words magnitude = bits & 0x7fffffffu;
  const SignedWords ordered = reinterpret_cast<SignedWords>(magnitude);
  // A subnormal: the addition shifts its fraction to the end of the word, and rounds.
  const Words base = Words{} + (126u << 23);
  const Words subnormal =
      reinterpret_cast<Words>(reinterpret_cast<Floats>(magnitude) + reinterpret_cast<Floats>(base)) - base;
  const Words odd = (magnitude >> 13) & 1u;
  const Words normal = (magnitude - (112u << 23) + 0xfffu + odd) >> 13;
  const Words finite = choose(mask_of(ordered < 113 << 23), subnormal, normal);
  const Words nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  const Words special = choose(mask_of(ordered > 0x7f800000), nan, Words{} + 0x7c00u);
  const Words result = choose(mask_of(ordered >= 143 << 23), special, finite);
  return __builtin_convertvector(result | (bits >> 16 & 0x8000u), Halves);
#endif
}

// ---- formats ----

/// Elements that are computed in as they lie.
template <class T>
struct Plain {
  static constexpr std::size_t element = sizeof(T);
  static constexpr std::size_t lanes = vector_bytes / sizeof(T);
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

/// Pairs of a real and an imaginary part; lanes of V alternate.
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
using BFloat16 = Half<widen_bfloat16, narrow_bfloat16>;

// ---- operations ----

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
  static constexpr std::size_t lanes = vector_bytes / sizeof(T);
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

// ---- kernels ----

template <class Format, class Op, bool past_caches>
void reduce_range(const void* const* inputs, std::size_t inputs_count, char* out, std::size_t count,
                  [[maybe_unused]] typename Format::Scalar divisor) noexcept {
  constexpr std::size_t whole = Format::element * Format::lanes;
  walk<Format::element, Format::lanes, past_caches>(
      out, count, [&](std::size_t at, auto vectors, auto access) __attribute__((always_inline)) {
        typename Format::V result[vectors];
        const auto* first = static_cast<const char*>(inputs[0]) + at;
        for (std::size_t v = 0; v < vectors; ++v) result[v] = Format::load(first + v * whole, access);
        for (std::size_t i = 1; i < inputs_count; ++i) {
          const auto* next = static_cast<const char*>(inputs[i]) + at;
          for (std::size_t v = 0; v < vectors; ++v)
            result[v] = Op::combine(result[v], Format::load(next + v * whole, access));
        }
        for (std::size_t v = 0; v < vectors; ++v) {
          if constexpr (std::is_same_v<Op, Average>) result[v] = result[v] / divisor;
          Format::store(out + at + v * whole, result[v], access);
        }
      });
}

template <class Format, class Op>
void reduce(const void* const* inputs, std::size_t inputs_count, void* out, std::size_t count, double divisor,
            bool past_caches) noexcept {
  auto* to = static_cast<char*>(out);
  const auto by = static_cast<typename Format::Scalar>(divisor);
  if (past_caches)
    reduce_range<Format, Op, true>(inputs, inputs_count, to, count, by);
  else
    reduce_range<Format, Op, false>(inputs, inputs_count, to, count, by);
}

/// Bits are bits, whatever the width of the integer.
template <class Op, std::size_t element>
void reduce_bits(const void* const* inputs, std::size_t inputs_count, void* out, std::size_t count,
                 double divisor, bool past_caches) noexcept {
  reduce<Plain<std::uint8_t>, Op>(inputs, inputs_count, out, count * element, divisor, past_caches);
}

void copy_past_caches(void* out, const void* in, std::size_t bytes) noexcept {
  reduce_range<Plain<std::uint8_t>, Or, true>(&in, 1, static_cast<char*>(out), bytes, 1);
}

template <class Format>
void widen(const void* in, float* out, std::size_t count) noexcept {
  const auto* from = static_cast<const char*>(in);
  auto* to = reinterpret_cast<char*>(out);
  walk<2, float_lanes, false>(
      in, count, [&](std::size_t at, auto vectors, auto access) __attribute__((always_inline)) {
        for (std::size_t v = 0; v < vectors; ++v) {
          const std::size_t here = at + v * 2 * float_lanes;
          const Floats wide = Format::load(from + here, access);
          if constexpr (std::is_same_v<decltype(access), Partial>)
            std::memcpy(to + 2 * here, &wide, 2 * access.bytes);
          else
            std::memcpy(to + 2 * here, &wide, sizeof wide);
        }
      });
}

template <class Format>
void narrow(const float* in, void* out, std::size_t count) noexcept {
  const auto* from = reinterpret_cast<const char*>(in);
  auto* to = static_cast<char*>(out);
  walk<2, float_lanes, false>(
      out, count, [&](std::size_t at, auto vectors, auto access) __attribute__((always_inline)) {
        for (std::size_t v = 0; v < vectors; ++v) {
          const std::size_t here = at + v * 2 * float_lanes;
          Floats wide{};
          if constexpr (std::is_same_v<decltype(access), Partial>)
            std::memcpy(&wide, from + 2 * here, 2 * access.bytes);
          else
            std::memcpy(&wide, from + 2 * here, sizeof wide);
          Format::store(to + here, wide, access);
        }
      });
}

// Sums and products of integers are those of the unsigned type: they wrap around.
template <class Integer>
constexpr void fill_integers(KernelTable::Reduce (&row)[kernel_ops]) {
  using Unsigned = std::make_unsigned_t<Integer>;
  row[0] = reduce<Plain<Unsigned>, Sum>;
  row[2] = reduce<Plain<Unsigned>, Product>;
  row[3] = reduce<Plain<Integer>, Minimum>;
  row[4] = reduce<Plain<Integer>, Maximum>;
  row[5] = reduce_bits<And, sizeof(Integer)>;
  row[6] = reduce_bits<Or, sizeof(Integer)>;
}

template <class Format>
constexpr void fill_floats(KernelTable::Reduce (&row)[kernel_ops]) {
  row[0] = reduce<Format, Sum>;
  row[1] = reduce<Format, Average>;
  row[2] = reduce<Format, Product>;
  row[3] = reduce<Format, Minimum>;
  row[4] = reduce<Format, Maximum>;
}

template <class T>
constexpr void fill_complex(KernelTable::Reduce (&row)[kernel_ops]) {
  row[0] = reduce<Complex<T>, Sum>;
  row[1] = reduce<Complex<T>, Average>;
  row[2] = reduce<Complex<T>, ComplexProduct<T>>;
}

constexpr KernelTable make_table() {
  KernelTable made{};
  auto& rows = made.reduce;
  fill_integers<std::uint8_t>(rows[0]);
  fill_integers<std::int8_t>(rows[1]);
  fill_integers<std::uint16_t>(rows[2]);
  fill_integers<std::int16_t>(rows[3]);
  fill_integers<std::uint32_t>(rows[4]);
  fill_integers<std::int32_t>(rows[5]);
  fill_integers<std::uint64_t>(rows[6]);
  fill_integers<std::int64_t>(rows[7]);
  fill_floats<Float16>(rows[8]);
  fill_floats<BFloat16>(rows[9]);
  fill_floats<Plain<float>>(rows[10]);
  fill_floats<Plain<double>>(rows[11]);
  fill_complex<float>(rows[12]);
  fill_complex<double>(rows[13]);
  rows[14][0] = rows[14][4] = rows[14][6] = reduce<Boolean, Or>;   // sum, max, or
  rows[14][2] = rows[14][3] = rows[14][5] = reduce<Boolean, And>;  // product, min, and
  made.copy_past_caches = copy_past_caches;
  made.widen[0] = widen<Float16>;
  made.widen[1] = widen<BFloat16>;
  made.narrow[0] = narrow<Float16>;
  made.narrow[1] = narrow<BFloat16>;
  return made;
}

constexpr KernelTable table = make_table();

}  // namespace
}  // namespace accelmgr::collective
