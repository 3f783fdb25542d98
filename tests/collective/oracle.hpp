// Reductions by their definition, one element at a time. Tests compare the kernels with them.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "accelmgr/communicator.hpp"

namespace accelmgr::collective::test {

struct Float16 {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

inline float from_half(BFloat16 v) { return std::bit_cast<float>(std::uint32_t{v.bits} << 16); }

inline float from_half(Float16 v) {
  const int exponent = v.bits >> 10 & 0x1f;
  const int fraction = v.bits & 0x3ff;
  float magnitude = 0;
  if (exponent == 0x1f)
    magnitude = fraction == 0 ? std::numeric_limits<float>::infinity() : std::nanf("");
  else if (exponent == 0)
    magnitude = std::ldexp(static_cast<float>(fraction), -24);
  else
    magnitude = std::ldexp(static_cast<float>(fraction + 0x400), exponent - 25);
  return std::copysign(magnitude, (v.bits & 0x8000) != 0 ? -1.0f : 1.0f);
}

/// Rounds to the nearest number, ties to even. Infinity takes the place of the number that would follow the
/// largest one.
template <class Half>
Half to_half(float value) {
  constexpr std::uint16_t infinity = std::is_same_v<Half, Float16> ? 0x7c00 : 0x7f80;
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const auto half = [sign](std::uint16_t bits) { return Half{static_cast<std::uint16_t>(bits | sign)}; };
  if (std::isnan(value)) return half(infinity | 1);
  const double magnitude = std::fabs(static_cast<double>(value));
  const auto exact = [](std::uint16_t bits) {
    if (bits != infinity) return static_cast<double>(from_half(Half{bits}));
    return std::ldexp(1.0, std::is_same_v<Half, Float16> ? 16 : 128);
  };
  std::uint16_t below = 0, above = infinity;  // In the loop: exact(below) <= magnitude < exact(above).
  if (magnitude >= exact(infinity)) return half(infinity);
  while (above - below > 1) {
    const auto middle = static_cast<std::uint16_t>((below + above) / 2);
    (exact(middle) <= magnitude ? below : above) = middle;
  }
  const double down = magnitude - exact(below), up = exact(above) - magnitude;
  if (down != up) return half(down < up ? below : above);
  return half(below % 2 == 0 ? below : above);
}

template <class T>
constexpr bool is_complex = false;
template <class T>
constexpr bool is_complex<std::complex<T>> = true;

template <class T>
T combine(ReduceOp op, T a, T b) {
  if constexpr (std::is_same_v<T, bool>) {
    const bool conjunction = op == ReduceOp::product || op == ReduceOp::min || op == ReduceOp::bit_and;
    return conjunction ? a && b : a || b;
  } else if constexpr (is_complex<T>) {
    if (op != ReduceOp::product) return {a.real() + b.real(), a.imag() + b.imag()};
    return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
  } else {
    // Integers wrap around.
    using Wide = typename std::conditional_t<std::is_integral_v<T>, std::type_identity<std::uint64_t>,
                                             std::type_identity<T>>::type;
    const auto wide_a = static_cast<Wide>(a), wide_b = static_cast<Wide>(b);
    switch (op) {
      case ReduceOp::sum:
      case ReduceOp::avg:
        return static_cast<T>(wide_a + wide_b);
      case ReduceOp::product:
        return static_cast<T>(wide_a * wide_b);
      case ReduceOp::min:
        return a < b || a != a ? a : b;
      case ReduceOp::max:
        return a > b || a != a ? a : b;
      case ReduceOp::bit_and:
      case ReduceOp::bit_or:
        if constexpr (std::is_integral_v<T>)
          return static_cast<T>(op == ReduceOp::bit_and ? wide_a & wide_b : wide_a | wide_b);
    }
    return a;
  }
}

template <class T>
T reduce_values(ReduceOp op, const std::vector<T>& values, std::size_t divisor) {
  T result = values[0];
  for (std::size_t i = 1; i < values.size(); ++i) result = combine<T>(op, result, values[i]);
  if constexpr (is_complex<T>) {
    const auto by = static_cast<typename T::value_type>(divisor);
    if (op == ReduceOp::avg) result = {result.real() / by, result.imag() / by};
  } else if constexpr (std::is_floating_point_v<T>) {
    if (op == ReduceOp::avg) result = result / static_cast<T>(divisor);
  }
  return result;
}

/// Calls `use` with a value of the C++ type of `dtype`.
template <class Use>
auto with_type(DType dtype, Use use) {
  switch (dtype) {
    case DType::uint8:
      return use(std::uint8_t{});
    case DType::int8:
      return use(std::int8_t{});
    case DType::uint16:
      return use(std::uint16_t{});
    case DType::int16:
      return use(std::int16_t{});
    case DType::uint32:
      return use(std::uint32_t{});
    case DType::int32:
      return use(std::int32_t{});
    case DType::uint64:
      return use(std::uint64_t{});
    case DType::int64:
      return use(std::int64_t{});
    case DType::float16:
      return use(Float16{});
    case DType::bfloat16:
      return use(BFloat16{});
    case DType::float32:
      return use(float{});
    case DType::float64:
      return use(double{});
    case DType::complex64:
      return use(std::complex<float>{});
    case DType::complex128:
      return use(std::complex<double>{});
    case DType::boolean:
      return use(bool{});
    default:
      throw std::invalid_argument("no reduction has this dtype");
  }
}

/// Writes the reduction of `inputs`, in their order, to `out`. All have `count` elements of T; avg divides by
/// `divisor`.
template <class T>
void reduce_elements(ReduceOp op, const std::vector<const unsigned char*>& inputs, unsigned char* out,
                     std::size_t count, std::size_t divisor) {
  constexpr bool half = std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;
  using Value = std::conditional_t<half, float, T>;
  for (std::size_t i = 0; i < count; ++i) {
    std::vector<Value> values;
    for (const auto* input : inputs) {
      T element;
      std::memcpy(&element, input + i * sizeof(T), sizeof(T));
      if constexpr (half)
        values.push_back(from_half(element));
      else
        values.push_back(element);
    }
    if constexpr (half) {
      const auto result = to_half<T>(reduce_values<float>(op, values, divisor));
      std::memcpy(out + i * sizeof(T), &result, sizeof(T));
    } else {
      const T result = reduce_values<T>(op, values, divisor);
      std::memcpy(out + i * sizeof(T), &result, sizeof(T));
    }
  }
}

/// Whether each two elements of T have the same bits or are both NaN.
template <class T>
bool same_elements(const unsigned char* a, const unsigned char* b, std::size_t count) {
  const auto same = [](auto x, auto y) {
    if constexpr (std::is_floating_point_v<decltype(x)>)
      if (x != x) return y != y;
    return std::memcmp(&x, &y, sizeof x) == 0;
  };
  for (std::size_t i = 0; i < count; ++i) {
    T x, y;
    std::memcpy(&x, a + i * sizeof(T), sizeof(T));
    std::memcpy(&y, b + i * sizeof(T), sizeof(T));
    if constexpr (is_complex<T>) {
      if (!same(x.real(), y.real()) || !same(x.imag(), y.imag())) return false;
    } else if constexpr (std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>) {
      if (!same(from_half(x), from_half(y))) return false;
    } else {
      if (!same(x, y)) return false;
    }
  }
  return true;
}

}  // namespace accelmgr::collective::test
