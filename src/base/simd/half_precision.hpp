// Conversion of float16 and bfloat16 to float32, exact, and back, rounded to nearest even. All names are
// local to the including file, for the reason given in base/simd/vectors.hpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/simd/vectors.hpp"

namespace accelmgr::base::simd {
namespace {

template <std::size_t lanes>
using FloatsOf = Vector<float, lanes>;
template <std::size_t lanes>
using HalvesOf = Vector<std::uint16_t, lanes>;
template <std::size_t lanes>
using WordsOf = Vector<std::uint32_t, lanes>;
template <std::size_t lanes>
using SignedWordsOf = Vector<std::int32_t, lanes>;

template <class Words>
ACCELMGR_INLINE Words choose(Words mask, Words yes, Words no) {
  return (mask & yes) | (~mask & no);
}

template <std::size_t lanes>
ACCELMGR_INLINE FloatsOf<lanes> widen_bfloat16(HalvesOf<lanes> v) {
  return reinterpret_cast<FloatsOf<lanes>>(__builtin_convertvector(v, WordsOf<lanes>) << 16);
}

/// A NaN keeps its sign and high bits and is made quiet, because rounding could turn it into infinity.
template <std::size_t lanes>
ACCELMGR_INLINE HalvesOf<lanes> narrow_bfloat16(FloatsOf<lanes> v) {
  using Words = WordsOf<lanes>;
  const Words bits = reinterpret_cast<Words>(v);
  const Words high = bits >> 16;
  const Words rounded = (bits + 0x7fffu + (high & 1u)) >> 16;
  const Words nan =
      reinterpret_cast<Words>(reinterpret_cast<SignedWordsOf<lanes>>(bits & 0x7fffffffu) > 0x7f800000);
  return __builtin_convertvector(choose<Words>(nan, high | 0x40u, rounded), HalvesOf<lanes>);
}

// float16, in vectors of float32 that fill a register.
constexpr std::size_t float_lanes = lanes_of<float>;
using Floats = FloatsOf<float_lanes>;
using Halves = HalvesOf<float_lanes>;
using Words = WordsOf<float_lanes>;
using SignedWords = SignedWordsOf<float_lanes>;

ACCELMGR_INLINE Words mask_of(SignedWords comparison) { return reinterpret_cast<Words>(comparison); }

#if defined(__AVX512F__)
// With a mask, because g++ 12 warns about its own inline functions without one (GCC bug 105593).
constexpr __mmask16 all_lanes = 0xffff;
#endif

/// The portable form adds 112 to the exponent, and again 112 to that of infinity and NaN. It makes a
/// subnormal by setting its fraction below a power of two, which it then subtracts.
ACCELMGR_INLINE Floats widen_float16(Halves v) {
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(_mm512_maskz_cvtph_ps(all_lanes, reinterpret_cast<__m256i>(v)));
#elif defined(__F16C__)
  return reinterpret_cast<Floats>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(v)));
#elif defined(__aarch64__)
  return reinterpret_cast<Floats>(vcvt_f32_f16(reinterpret_cast<float16x4_t>(v)));
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

/// Values beyond the largest float16 become infinity.
ACCELMGR_INLINE Halves narrow_float16(Floats v) {
#if defined(__AVX512F__)
  return reinterpret_cast<Halves>(_mm512_maskz_cvtps_ph(all_lanes, reinterpret_cast<__m512>(v),
                                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
  return reinterpret_cast<Halves>(
      _mm256_cvtps_ph(reinterpret_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__aarch64__)
  return reinterpret_cast<Halves>(vcvt_f16_f32(reinterpret_cast<float32x4_t>(v)));
#else
  const Words bits = reinterpret_cast<Words>(v);
  const Words magnitude = bits & 0x7fffffffu;
  const SignedWords ordered = reinterpret_cast<SignedWords>(magnitude);
  // A subnormal result: the addition shifts the fraction to the end of the word, and rounds it.
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

}  // namespace
}  // namespace accelmgr::base::simd
