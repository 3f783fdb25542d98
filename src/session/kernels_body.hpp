// The kernels, written once over the compiler's vector types. Each variant (kernels_portable.cpp,
// kernels_avx2.cpp, kernels_avx512.cpp) includes this file once, compiled for its instruction set; all names
// are local to it.
//
// A range is walked in blocks of `unroll` vectors, then in single vectors, then in one partial vector through
// a zeroed register image: so every element meets the same operations, wherever it lies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "session/kernels_table.hpp"

namespace accelmgr::session {
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

/// Vectors of a master's element fill a register; those of its slabs have as many lanes.
template <class Master>
constexpr std::size_t lanes_of = vector_bytes / sizeof(Master);

using bf16 = std::uint16_t;

template <class V>
ACCELMGR_INLINE void store_non_temporal(void* to, V v) {
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

ACCELMGR_INLINE void fence_non_temporal() {
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
struct WholeNonTemporal : Whole {
  template <class V>
  ACCELMGR_INLINE static void store(void* to, V v) {
    store_non_temporal(to, v);
  }
};
struct Partial {
  std::size_t count;  ///< Of the vector's lanes.
  template <class V>
  ACCELMGR_INLINE V load(const void* from) const {
    V v{};
    std::memcpy(&v, from, count * sizeof(v[0]));
    return v;
  }
  template <class V>
  ACCELMGR_INLINE void store(void* to, V v) const {
    std::memcpy(to, &v, count * sizeof(v[0]));
  }
};

/// Calls step(offset, vectors, access) over [0, count): `vectors` is an integral constant. Non-temporal
/// stores need an aligned `destination`, which a partial step at the beginning provides; one that cannot be
/// aligned is written regularly.
template <class Store, std::size_t lanes, bool non_temporal, class Step>
ACCELMGR_INLINE void walk(const Store* destination, std::size_t count, Step step) {
  using Access = std::conditional_t<non_temporal, WholeNonTemporal, Whole>;
  constexpr std::size_t bytes = lanes * sizeof(Store);
  std::size_t at = 0;
  if constexpr (non_temporal) {
    const auto misaligned = reinterpret_cast<std::uintptr_t>(destination) % bytes;
    if (misaligned % sizeof(Store) != 0) return walk<Store, lanes, false>(destination, count, step);
    if (misaligned != 0) {
      const std::size_t head = (bytes - misaligned) / sizeof(Store);
      at = head < count ? head : count;
      step(std::size_t{0}, std::integral_constant<std::size_t, 1>{}, Partial{at});
    }
  }
  for (; count - at >= unroll * lanes; at += unroll * lanes)
    step(at, std::integral_constant<std::size_t, unroll>{}, Access{});
  for (; count - at >= lanes; at += lanes) step(at, std::integral_constant<std::size_t, 1>{}, Access{});
  if (at < count) step(at, std::integral_constant<std::size_t, 1>{}, Partial{count - at});
  if constexpr (non_temporal) fence_non_temporal();
}

template <std::size_t lanes>
ACCELMGR_INLINE Vector<float, lanes> widen(Vector<bf16, lanes> v) {
  return reinterpret_cast<Vector<float, lanes>>(__builtin_convertvector(v, Vector<std::uint32_t, lanes>)
                                                << 16);
}

/// To nearest even. A NaN keeps its sign and high bits and is made quiet: rounding could carry it into
/// infinity.
template <std::size_t lanes>
ACCELMGR_INLINE Vector<bf16, lanes> narrow(Vector<float, lanes> v) {
  using Bits = Vector<std::uint32_t, lanes>;
  using Signed = Vector<std::int32_t, lanes>;
  const Bits bits = reinterpret_cast<Bits>(v);
  const Bits high = bits >> 16;
  const Bits rounded = (bits + 0x7fffu + (high & 1u)) >> 16;
  const Bits nan = reinterpret_cast<Bits>(reinterpret_cast<Signed>(bits & 0x7fffffffu) > 0x7f800000);
  return __builtin_convertvector((nan & (high | 0x40u)) | (~nan & rounded), Vector<bf16, lanes>);
}

/// One vector of a slab, in the type it is summed in.
template <class Slab, std::size_t lanes, class Access>
ACCELMGR_INLINE auto load_slab(const Slab* from, Access access) {
  const auto v = access.template load<Vector<Slab, lanes>>(from);
  if constexpr (std::is_same_v<Slab, bf16>) {
    return widen<lanes>(v);
  } else {
    return v;
  }
}

/// `fixed`: the number of slabs where it is known, so that their addresses stay in registers; 0: `slab_count`
/// of them.
template <class Master, class Slab, std::size_t fixed, bool accumulate, bool non_temporal>
void reduce_slabs(Master* master, const void* const* slabs, std::size_t slab_count, std::size_t count,
                  Master scale) noexcept {
  constexpr std::size_t lanes = lanes_of<Master>;
  using MasterVector = Vector<Master, lanes>;
  using SumVector = Vector<std::conditional_t<std::is_same_v<Slab, bf16>, float, Master>, lanes>;

  const Slab* begin[fixed == 0 ? 1 : fixed];
  for (std::size_t s = 0; s < fixed; ++s) begin[s] = static_cast<const Slab*>(slabs[s]);
  const auto slab = [&](std::size_t s) __attribute__((always_inline)) {
    if constexpr (fixed == 0) {
      return static_cast<const Slab*>(slabs[s]);
    } else {
      return begin[s];
    }
  };
  if constexpr (fixed != 0) slab_count = fixed;

  walk<Master, lanes, non_temporal>(
      master, count, [&](std::size_t at, auto vectors, auto access) __attribute__((always_inline)) {
        SumVector sum[vectors];
        for (std::size_t v = 0; v < vectors; ++v)
          sum[v] = load_slab<Slab, lanes>(slab(0) + at + v * lanes, access);
        for (std::size_t s = 1; s < slab_count; ++s) {
          const Slab* next = slab(s) + at;
          for (std::size_t v = 0; v < vectors; ++v)
            sum[v] += load_slab<Slab, lanes>(next + v * lanes, access);
        }
        for (std::size_t v = 0; v < vectors; ++v) {
          Master* to = master + at + v * lanes;
          MasterVector result = __builtin_convertvector(sum[v], MasterVector) * scale;  // Times 1 is exact.
          if constexpr (accumulate) result = access.template load<MasterVector>(to) + result;
          access.store(to, result);
        }
      });
}

template <class Master, class Slab, bool accumulate, bool non_temporal>
void reduce_by_count(void* master, const void* const* slabs, std::size_t slab_count, std::size_t count,
                     Master scale) noexcept {
  auto* to = static_cast<Master*>(master);
  switch (slab_count) {
    case 1:
      return reduce_slabs<Master, Slab, 1, accumulate, non_temporal>(to, slabs, slab_count, count, scale);
    case 2:
      return reduce_slabs<Master, Slab, 2, accumulate, non_temporal>(to, slabs, slab_count, count, scale);
    case 3:
      return reduce_slabs<Master, Slab, 3, accumulate, non_temporal>(to, slabs, slab_count, count, scale);
    case 4:
      return reduce_slabs<Master, Slab, 4, accumulate, non_temporal>(to, slabs, slab_count, count, scale);
    default:
      return reduce_slabs<Master, Slab, 0, accumulate, non_temporal>(to, slabs, slab_count, count, scale);
  }
}

void zero_non_temporal(void* begin, std::size_t bytes) noexcept {
  auto* to = static_cast<char*>(begin);
  walk<char, vector_bytes, true>(
      to, bytes, [&](std::size_t at, auto vectors, auto access) __attribute__((always_inline)) {
        for (std::size_t v = 0; v < vectors; ++v)
          access.store(to + at + v * vector_bytes, Vector<char, vector_bytes>{});
      });
}

template <class Master, class Slab>
void reduce(void* master, const void* const* slabs, std::size_t slab_count, std::size_t count, double scale,
            SumInto into) noexcept {
  const auto s = static_cast<Master>(scale);
  if (slab_count == 0) {
    if (into == SumInto::overwrite) std::memset(master, 0, count * sizeof(Master));
    if (into == SumInto::overwrite_non_temporal) zero_non_temporal(master, count * sizeof(Master));
    return;
  }
  switch (into) {
    case SumInto::overwrite:
      return reduce_by_count<Master, Slab, false, false>(master, slabs, slab_count, count, s);
    case SumInto::overwrite_non_temporal:
      return reduce_by_count<Master, Slab, false, true>(master, slabs, slab_count, count, s);
    case SumInto::accumulate:
      return reduce_by_count<Master, Slab, true, false>(master, slabs, slab_count, count, s);
  }
}

template <class T>
using WordOf = std::conditional_t<sizeof(T) == 2, std::uint16_t,
                                  std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>>;

/// Exponents that are all ones carry into the sign: the top bit of a lane tells infinity and NaN.
template <class T, std::size_t lanes>
ACCELMGR_INLINE Vector<WordOf<T>, lanes> carry_of_nonfinite(Vector<T, lanes> v) {
  using Word = WordOf<T>;
  constexpr int mantissa_bits = sizeof(T) == 2 ? 7 : sizeof(T) == 4 ? 23 : 52;
  constexpr Word lowest = static_cast<Word>(Word{1} << mantissa_bits);
  constexpr Word sign = static_cast<Word>(Word{1} << (8 * sizeof(T) - 1));
  constexpr Word exponent = static_cast<Word>(sign - lowest);
  return (reinterpret_cast<Vector<Word, lanes>>(v) & exponent) + lowest;
}

template <class Master, class Slab, bool add, bool non_temporal>
bool take_over_range(Slab* slab, const Master* gradient, std::size_t count) noexcept {
  constexpr std::size_t lanes = lanes_of<Master>;
  using Sum = std::conditional_t<std::is_same_v<Slab, bf16>, float, Master>;
  Vector<WordOf<Slab>, lanes> nonfinite{};
  walk<Slab, lanes, non_temporal>(
      slab, count, [&](std::size_t at, auto vectors, auto access) __attribute__((always_inline)) {
        for (std::size_t v = 0; v < vectors; ++v) {
          Slab* to = slab + at + v * lanes;
          const auto from = access.template load<Vector<Master, lanes>>(gradient + at + v * lanes);
          auto value = __builtin_convertvector(from, Vector<Sum, lanes>);
          if constexpr (add) value = load_slab<Slab, lanes>(to, access) + value;
          Vector<Slab, lanes> stored;
          if constexpr (std::is_same_v<Slab, bf16>) {
            stored = narrow<lanes>(value);
          } else {
            stored = value;
          }
          nonfinite |= carry_of_nonfinite<Slab, lanes>(stored);
          access.store(to, stored);
        }
      });
  bool finite = true;
  for (std::size_t lane = 0; lane < lanes; ++lane) finite &= nonfinite[lane] >> (8 * sizeof(Slab) - 1) == 0;
  return finite;
}

template <class Master, class Slab>
bool take_over(void* slab, const void* gradient, std::size_t count, TakeOver how) noexcept {
  auto* to = static_cast<Slab*>(slab);
  const auto* from = static_cast<const Master*>(gradient);
  switch (how) {
    case TakeOver::copy:
      return take_over_range<Master, Slab, false, false>(to, from, count);
    case TakeOver::copy_non_temporal:
      return take_over_range<Master, Slab, false, true>(to, from, count);
    case TakeOver::add:
      return take_over_range<Master, Slab, true, false>(to, from, count);
  }
  return false;
}

template <class Master>
bool all_finite(const void* gradient, std::size_t count) noexcept {
  constexpr std::size_t lanes = lanes_of<Master>;
  const auto* from = static_cast<const Master*>(gradient);
  Vector<WordOf<Master>, lanes> nonfinite{};
  walk<Master, lanes, false>(
      from, count, [&](std::size_t at, auto vectors, auto access) __attribute__((always_inline)) {
        for (std::size_t v = 0; v < vectors; ++v)
          nonfinite |= carry_of_nonfinite<Master, lanes>(
              access.template load<Vector<Master, lanes>>(from + at + v * lanes));
      });
  bool finite = true;
  for (std::size_t lane = 0; lane < lanes; ++lane) finite &= nonfinite[lane] >> (8 * sizeof(Master) - 1) == 0;
  return finite;
}

void save(void* image, const void* chunk, std::size_t bytes) noexcept {
  auto* to = static_cast<char*>(image);
  const auto* from = static_cast<const char*>(chunk);
  walk<char, vector_bytes, false>(
      to, bytes, [&](std::size_t at, auto vectors, auto access) __attribute__((always_inline)) {
        for (std::size_t v = 0; v < vectors; ++v) {
          const std::size_t here = at + v * vector_bytes;
          access.store(to + here, access.template load<Vector<char, vector_bytes>>(from + here));
        }
      });
}

constexpr KernelTable table = {
    .reduce = {{reduce<float, float>, reduce<float, bf16>}, {reduce<double, double>, reduce<double, bf16>}},
    .take_over = {{take_over<float, float>, take_over<float, bf16>},
                  {take_over<double, double>, take_over<double, bf16>}},
    .all_finite = {all_finite<float>, all_finite<double>},
    .save = save,
    .zero_non_temporal = zero_non_temporal,
};

}  // namespace
}  // namespace accelmgr::session
