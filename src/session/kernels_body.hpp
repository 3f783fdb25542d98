// The kernels. Each variant (kernels_portable.cpp, kernels_avx2.cpp, kernels_avx512.cpp) includes this file
// once and compiles it for its instruction set. All names have internal linkage.
//
// A vector of master elements fills a register; a vector of slab elements has the same number of lanes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/simd/halves.hpp"
#include "base/simd/vectors.hpp"
#include "session/kernels_table.hpp"

namespace accelmgr::session {
namespace {

using namespace base::simd;

using bf16 = std::uint16_t;

/// Loads one vector of a slab, converted to the type in which it is summed.
template <class Slab, std::size_t lanes, class Access>
ACCELMGR_INLINE auto load_slab(const Slab* from, Access access) {
  const auto v = access.template load<Vector<Slab, lanes>>(from);
  if constexpr (std::is_same_v<Slab, bf16>) {
    return widen_bfloat16<lanes>(v);
  } else {
    return v;
  }
}

/// `fixed` is the number of slabs if it is known at compile time, which keeps their addresses in registers.
/// If it is 0 there are `slab_count`.
template <class Master, class Slab, std::size_t fixed, bool accumulate, bool past_caches>
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

  walk<sizeof(Master), lanes, past_caches>(
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

template <class Master, class Slab, bool accumulate, bool past_caches>
void reduce_by_count(void* master, const void* const* slabs, std::size_t slab_count, std::size_t count,
                     Master scale) noexcept {
  auto* to = static_cast<Master*>(master);
  switch (slab_count) {
    case 1:
      return reduce_slabs<Master, Slab, 1, accumulate, past_caches>(to, slabs, slab_count, count, scale);
    case 2:
      return reduce_slabs<Master, Slab, 2, accumulate, past_caches>(to, slabs, slab_count, count, scale);
    case 3:
      return reduce_slabs<Master, Slab, 3, accumulate, past_caches>(to, slabs, slab_count, count, scale);
    case 4:
      return reduce_slabs<Master, Slab, 4, accumulate, past_caches>(to, slabs, slab_count, count, scale);
    default:
      return reduce_slabs<Master, Slab, 0, accumulate, past_caches>(to, slabs, slab_count, count, scale);
  }
}

void zero_non_temporal(void* begin, std::size_t bytes) noexcept {
  auto* to = static_cast<char*>(begin);
  walk<1, vector_bytes, true>(
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

/// Sets the top bit of a lane if its value is infinite or NaN: adding one to an exponent of all ones carries
/// into the sign bit.
template <class T, std::size_t lanes>
ACCELMGR_INLINE Vector<WordOf<T>, lanes> carry_of_nonfinite(Vector<T, lanes> v) {
  using Word = WordOf<T>;
  constexpr int mantissa_bits = sizeof(T) == 2 ? 7 : sizeof(T) == 4 ? 23 : 52;
  constexpr Word lowest = static_cast<Word>(Word{1} << mantissa_bits);
  constexpr Word sign = static_cast<Word>(Word{1} << (8 * sizeof(T) - 1));
  constexpr Word exponent = static_cast<Word>(sign - lowest);
  return (reinterpret_cast<Vector<Word, lanes>>(v) & exponent) + lowest;
}

/// Whether no lane has its top bit set.
template <class Word, std::size_t lanes>
ACCELMGR_INLINE bool all_finite(const Vector<Word, lanes>& carries) {
  bool finite = true;
  for (std::size_t lane = 0; lane < lanes; ++lane) finite &= carries[lane] >> (8 * sizeof(Word) - 1) == 0;
  return finite;
}

template <class T>
bool finite(const void* values, std::size_t count) noexcept {
  constexpr std::size_t lanes = lanes_of<T>;
  const auto* from = static_cast<const T*>(values);
  Vector<WordOf<T>, lanes> nonfinite{};
  walk<sizeof(T), lanes, false>(
      from, count, [&](std::size_t at, auto vectors, auto access) __attribute__((always_inline)) {
        for (std::size_t v = 0; v < vectors; ++v)
          nonfinite |=
              carry_of_nonfinite<T, lanes>(access.template load<Vector<T, lanes>>(from + at + v * lanes));
      });
  return all_finite<WordOf<T>, lanes>(nonfinite);
}

template <class Master, class Slab, bool add, bool past_caches>
bool capture_range(Slab* slab, const Master* gradient, std::size_t count) noexcept {
  constexpr std::size_t lanes = lanes_of<Master>;
  using Sum = std::conditional_t<std::is_same_v<Slab, bf16>, float, Master>;
  Vector<WordOf<Slab>, lanes> nonfinite{};
  walk<sizeof(Slab), lanes, past_caches>(
      slab, count, [&](std::size_t at, auto vectors, auto access) __attribute__((always_inline)) {
        for (std::size_t v = 0; v < vectors; ++v) {
          Slab* to = slab + at + v * lanes;
          const auto from = access.template load<Vector<Master, lanes>>(gradient + at + v * lanes);
          auto value = __builtin_convertvector(from, Vector<Sum, lanes>);
          if constexpr (add) value = load_slab<Slab, lanes>(to, access) + value;
          Vector<Slab, lanes> stored;
          if constexpr (std::is_same_v<Slab, bf16>) {
            stored = narrow_bfloat16<lanes>(value);
          } else {
            stored = value;
          }
          nonfinite |= carry_of_nonfinite<Slab, lanes>(stored);
          access.store(to, stored);
        }
      });
  return all_finite<WordOf<Slab>, lanes>(nonfinite);
}

template <class Master, class Slab>
bool capture(void* slab, const void* gradient, std::size_t count, CaptureMode how) noexcept {
  auto* to = static_cast<Slab*>(slab);
  const auto* from = static_cast<const Master*>(gradient);
  switch (how) {
    case CaptureMode::copy:
      return capture_range<Master, Slab, false, false>(to, from, count);
    case CaptureMode::copy_non_temporal:
      return capture_range<Master, Slab, false, true>(to, from, count);
    case CaptureMode::add:
      return capture_range<Master, Slab, true, false>(to, from, count);
  }
  return false;
}

void save(void* image, const void* chunk, std::size_t bytes) noexcept {
  auto* to = static_cast<char*>(image);
  const auto* from = static_cast<const char*>(chunk);
  walk<1, vector_bytes, false>(
      to, bytes, [&](std::size_t at, auto vectors, auto access) __attribute__((always_inline)) {
        for (std::size_t v = 0; v < vectors; ++v) {
          const std::size_t here = at + v * vector_bytes;
          access.store(to + here, access.template load<Vector<char, vector_bytes>>(from + here));
        }
      });
}

constexpr KernelTable table = {
    .reduce = {{reduce<float, float>, reduce<float, bf16>}, {reduce<double, double>, reduce<double, bf16>}},
    .capture = {{capture<float, float>, capture<float, bf16>},
                {capture<double, double>, capture<double, bf16>}},
    .finite = {finite<float>, finite<double>},
    .save = save,
    .zero_non_temporal = zero_non_temporal,
};

}  // namespace
}  // namespace accelmgr::session
