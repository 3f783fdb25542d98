// The kernels. Each combines a format and an operation on the format's vectors. Each variant
// (kernels_portable.cpp, kernels_avx2.cpp, kernels_avx512.cpp) includes this file once and is compiled for
// its instruction set; all names are local to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/simd/elements.hpp"
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
  reduce<Format<Plain<std::uint8_t>>, Op>(inputs, inputs_count, out, count * element, divisor, past_caches);
}

// Signed integers are added and multiplied as unsigned ones, so that they wrap around.
template <class Integer>
constexpr void fill_integers(KernelTable::Reduce (&row)[kernel_ops]) {
  using Unsigned = std::make_unsigned_t<Integer>;
  row[0] = reduce<Format<Plain<Unsigned>>, Sum>;
  row[2] = reduce<Format<Plain<Unsigned>>, Product>;
  row[3] = reduce<Format<Plain<Integer>>, Minimum>;
  row[4] = reduce<Format<Plain<Integer>>, Maximum>;
  row[5] = reduce_bits<And, sizeof(Integer)>;
  row[6] = reduce_bits<Or, sizeof(Integer)>;
}

template <class Element>
constexpr void fill_floats(KernelTable::Reduce (&row)[kernel_ops]) {
  row[0] = reduce<Format<Element>, Sum>;
  row[1] = reduce<Format<Element>, Average>;
  row[2] = reduce<Format<Element>, Product>;
  row[3] = reduce<Format<Element>, Minimum>;
  row[4] = reduce<Format<Element>, Maximum>;
}

template <class T>
constexpr void fill_complex(KernelTable::Reduce (&row)[kernel_ops]) {
  row[0] = reduce<Complex<T>, Sum>;
  row[1] = reduce<Complex<T>, Average>;
  row[2] = reduce<Complex<T>, ComplexProduct<T>>;
}

/// The dtypes that parameters, gradients and counts have; or all, of the portable variant, which serves the
/// others too.
template <bool all_dtypes>
constexpr KernelTable make_table() {
  KernelTable made{};
  auto& rows = made.reduce;
  fill_integers<std::int32_t>(rows[5]);
  fill_integers<std::int64_t>(rows[7]);
  fill_floats<f16>(rows[8]);
  fill_floats<bf16>(rows[9]);
  fill_floats<f32>(rows[10]);
  fill_floats<f64>(rows[11]);
  made.copy_past_caches = convert<Plain<char>, Plain<char>, true>;
  made.widen[0] = convert<f16, f32, false>;
  made.widen[1] = convert<bf16, f32, false>;
  made.narrow[0] = convert<f32, f16, false>;
  made.narrow[1] = convert<f32, bf16, false>;
  if constexpr (all_dtypes) {
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
  }
  return made;
}
template <bool all_dtypes>
constexpr KernelTable table = make_table<all_dtypes>();

}  // namespace
}  // namespace accelmgr::collective
