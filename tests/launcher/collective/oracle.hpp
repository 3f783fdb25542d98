// Reductions by their definition, one element at a time. Tests compare the kernels and the communicators with
// them.
#pragma once

#include <algorithm>
#include <complex>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <vector>

#include "accelmgr/communicator.hpp"
#include "half_precision.hpp"

namespace accelmgr::collective::test {

using accelmgr::test::BFloat16;
using accelmgr::test::Float16;
using accelmgr::test::from_half;
using accelmgr::test::to_half;

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

/// The C++ types of the dtypes that have reductions, in the order of DType.
using Types = std::tuple<std::uint8_t, std::int8_t, std::uint16_t, std::int16_t, std::uint32_t, std::int32_t,
                         std::uint64_t, std::int64_t, Float16, BFloat16, float, double, std::complex<float>,
                         std::complex<double>, bool>;

/// Calls `use` with a value of the C++ type of `dtype`.
template <std::size_t i = 0, class Use>
auto with_type(DType dtype, Use use) {
  if constexpr (i + 1 < std::tuple_size_v<Types>)
    if (dtype != DType{i}) return with_type<i + 1>(dtype, use);
  if (dtype != DType{i}) throw std::invalid_argument("no reduction has this dtype");
  return use(std::tuple_element_t<i, Types>{});
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
