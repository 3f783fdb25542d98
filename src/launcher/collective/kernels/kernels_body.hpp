// The kernels. Each combines a format and an operation on the format's vectors. Each variant
// (kernels_portable.cpp, kernels_avx2.cpp, kernels_avx512.cpp) includes this file once and is compiled for
// its instruction set; all names are local to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/simd/half_precision.hpp"
#include "base/simd/vectors.hpp"
#include "launcher/collective/kernels/kernels_formats.hpp"
#include "launcher/collective/kernels/kernels_operations.hpp"
#include "launcher/collective/kernels/kernels_table.hpp"

namespace accelmgr::collective {
namespace {

template <class Format, class Op, bool past_caches>
void reduce_range(const void* const* inputs, std::size_t inputs_count, char* out, std::size_t count,
                  [[maybe_unused]] typename Format::Scalar divisor) noexcept {
  constexpr std::size_t whole = Format::element * Format::lanes;
  walk<Format::element, Format::lanes, past_caches>(
      out, count, [&](std::size_t at, auto vectors, auto access) __attribute__((always_inline)) {
        typename Format::V result[vectors];
        const std::size_t begin = at * Format::element;
        const auto* first = static_cast<const char*>(inputs[0]) + begin;
        for (std::size_t v = 0; v < vectors; ++v) result[v] = Format::load(first + v * whole, access);
        for (std::size_t i = 1; i < inputs_count; ++i) {
          const auto* next = static_cast<const char*>(inputs[i]) + begin;
          for (std::size_t v = 0; v < vectors; ++v)
            result[v] = Op::combine(result[v], Format::load(next + v * whole, access));
        }
        for (std::size_t v = 0; v < vectors; ++v) {
          if constexpr (std::is_same_v<Op, Average>) result[v] = result[v] / divisor;
          Format::store(out + begin + v * whole, result[v], access);
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

/// Bitwise operations work on bytes, whatever the width of the integer.
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
  walk<Format::element, Format::lanes, false>(
      in, count, [&](std::size_t at, auto vectors, auto access) __attribute__((always_inline)) {
        for (std::size_t v = 0; v < vectors; ++v) {
          const std::size_t here = at + v * Format::lanes;
          access.store(out + here, Format::load(from + here * Format::element, access));
        }
      });
}

template <class Format>
void narrow(const float* in, void* out, std::size_t count) noexcept {
  auto* to = static_cast<char*>(out);
  walk<Format::element, Format::lanes, false>(
      out, count, [&](std::size_t at, auto vectors, auto access) __attribute__((always_inline)) {
        for (std::size_t v = 0; v < vectors; ++v) {
          const std::size_t here = at + v * Format::lanes;
          Format::store(to + here * Format::element, access.template load<Floats>(in + here), access);
        }
      });
}

// Signed integers are added and multiplied as unsigned ones, so that they wrap around.
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

/// The dtypes that parameters, gradients and counts have.
constexpr KernelTable make_common() {
  KernelTable made{};
  auto& rows = made.reduce;
  fill_integers<std::int32_t>(rows[5]);
  fill_integers<std::int64_t>(rows[7]);
  fill_floats<Float16>(rows[8]);
  fill_floats<BFloat16>(rows[9]);
  fill_floats<Plain<float>>(rows[10]);
  fill_floats<Plain<double>>(rows[11]);
  made.copy_past_caches = copy_past_caches;
  made.widen[0] = widen<Float16>;
  made.widen[1] = widen<BFloat16>;
  made.narrow[0] = narrow<Float16>;
  made.narrow[1] = narrow<BFloat16>;
  return made;
}

/// All dtypes; of the portable variant, which serves the others too.
constexpr KernelTable make_all() {
  auto made = make_common();
  auto& rows = made.reduce;
  fill_integers<std::uint8_t>(rows[0]);
  fill_integers<std::int8_t>(rows[1]);
  fill_integers<std::uint16_t>(rows[2]);
  fill_integers<std::int16_t>(rows[3]);
  fill_integers<std::uint32_t>(rows[4]);
  fill_integers<std::uint64_t>(rows[6]);
  fill_complex<float>(rows[12]);
  fill_complex<double>(rows[13]);
  rows[14][0] = rows[14][4] = rows[14][6] = reduce<Boolean, Or>;   // sum, max, or
  rows[14][2] = rows[14][3] = rows[14][5] = reduce<Boolean, And>;  // product, min, and
  return made;
}

}  // namespace
}  // namespace accelmgr::collective
