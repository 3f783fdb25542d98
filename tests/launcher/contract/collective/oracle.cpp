#include "oracle.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <type_traits>

namespace accelmgr::collective::contract {
namespace {

/// A floating point number of 16 bits.
template <int exponent_bits, int mantissa_bits>
struct Half {
  std::uint16_t bits;

  static constexpr int bias = (1 << (exponent_bits - 1)) - 1;
  static constexpr int infinity = ((1 << exponent_bits) - 1) << mantissa_bits;

  float value() const {
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
    const float sign = bits >> 15 ? -1.f : 1.f;
    if (exponent == (1 << exponent_bits) - 1)
      return sign * (mantissa == 0 ? std::numeric_limits<float>::infinity()
                                   : std::numeric_limits<float>::quiet_NaN());
    const int whole = exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits);
    return sign * std::ldexp(static_cast<float>(whole), std::max(exponent, 1) - bias - mantissa_bits);
  }

  /// Rounds to the nearest, ties to even.
  static Half round(float value) {
    const int sign = std::signbit(value) ? 1 << 15 : 0;
    if (std::isnan(value)) return {static_cast<std::uint16_t>(sign | infinity | 1 << (mantissa_bits - 1))};
    if (std::isinf(value)) return {static_cast<std::uint16_t>(sign | infinity)};
    if (value == 0) return {static_cast<std::uint16_t>(sign)};
    int exponent = 0;
    std::frexp(value, &exponent);
    exponent = std::max(exponent - 1, 1 - bias);
    const auto whole =
        std::nearbyint(std::ldexp(std::abs(static_cast<double>(value)), mantissa_bits - exponent));
    // A mantissa that rounds up to the next power of two carries into the exponent.
    const int magnitude = ((exponent + bias - 1) << mantissa_bits) + static_cast<int>(whole);
    return {static_cast<std::uint16_t>(sign | std::min(magnitude, infinity))};
  }
};
using Float16 = Half<5, 10>;
using BFloat16 = Half<8, 7>;

/// The type that a reduction of Element is computed in.
template <class Element>
struct Computed {
  using Type = Element;
  static Type from(Element element) { return element; }
  static Element round(Type value) { return value; }
};
template <int exponent_bits, int mantissa_bits>
struct Computed<Half<exponent_bits, mantissa_bits>> {
  using Type = float;
  static Type from(Half<exponent_bits, mantissa_bits> element) { return element.value(); }
  static Half<exponent_bits, mantissa_bits> round(Type value) {
    return Half<exponent_bits, mantissa_bits>::round(value);
  }
};

[[noreturn]] void refuse(ReduceOp op) {
  throw std::invalid_argument(fmt::format("the oracle knows no {} of these", name_of(op)));
}

/// Combines two values. For avg it adds them: the division comes later.
template <class Value>
Value combine(Value a, Value b, ReduceOp op) {
  if constexpr (std::is_same_v<Value, bool>) {
    const bool is_or = op == ReduceOp::sum || op == ReduceOp::max || op == ReduceOp::bit_or;
    return is_or ? a || b : a && b;
  } else if constexpr (std::is_integral_v<Value>) {
    // A result modulo 2^64 is also right modulo 2^8, 2^16 and 2^32.
    const auto x = static_cast<std::uint64_t>(a);
    const auto y = static_cast<std::uint64_t>(b);
    switch (op) {
      case ReduceOp::sum:
        return static_cast<Value>(x + y);
      case ReduceOp::product:
        return static_cast<Value>(x * y);
      case ReduceOp::min:
        return std::min(a, b);
      case ReduceOp::max:
        return std::max(a, b);
      case ReduceOp::bit_and:
        return static_cast<Value>(x & y);
      case ReduceOp::bit_or:
        return static_cast<Value>(x | y);
      case ReduceOp::avg:
        break;
    }
    refuse(op);
  } else if constexpr (std::is_floating_point_v<Value>) {
    switch (op) {
      case ReduceOp::sum:
      case ReduceOp::avg:
        return a + b;
      case ReduceOp::product:
        return a * b;
      case ReduceOp::min:
        return std::min(a, b);
      case ReduceOp::max:
        return std::max(a, b);
      default:
        refuse(op);
    }
  } else {
    if (op == ReduceOp::sum || op == ReduceOp::avg) return {a.real() + b.real(), a.imag() + b.imag()};
    if (op != ReduceOp::product) refuse(op);
    return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
  }
}

template <class Value>
Value divide(Value sum, int by) {
  if constexpr (std::is_floating_point_v<Value>) {
    return sum / static_cast<Value>(by);
  } else {
    using Part = decltype(sum.real());
    return {sum.real() / static_cast<Part>(by), sum.imag() / static_cast<Part>(by)};
  }
}

template <class Element>
Element element_of(std::span<const std::byte> bytes, std::size_t at) {
  Element element;
  std::memcpy(&element, bytes.data() + at * sizeof(Element), sizeof(Element));
  return element;
}

template <class Element>
Bytes reduce_elements(std::span<const Bytes> inputs, ReduceOp op) {
  using As = Computed<Element>;
  Bytes result(inputs[0].size());
  for (std::size_t at = 0; at < result.size() / sizeof(Element); ++at) {
    auto value = As::from(element_of<Element>(inputs[0], at));
    for (const auto& input : inputs.subspan(1))
      value = combine(value, As::from(element_of<Element>(input, at)), op);
    if constexpr (!std::is_integral_v<typename As::Type>)
      if (op == ReduceOp::avg) value = divide(value, static_cast<int>(inputs.size()));
    const Element element = As::round(value);
    std::memcpy(result.data() + at * sizeof(Element), &element, sizeof(Element));
  }
  return result;
}

/// Calls `use.template operator()<Element>()` with the type of the elements.
template <class Use>
auto with_element(DType dtype, Use&& use) {
  switch (dtype) {
    case DType::uint8:
      return use.template operator()<std::uint8_t>();
    case DType::int8:
      return use.template operator()<std::int8_t>();
    case DType::uint16:
      return use.template operator()<std::uint16_t>();
    case DType::int16:
      return use.template operator()<std::int16_t>();
    case DType::uint32:
      return use.template operator()<std::uint32_t>();
    case DType::int32:
      return use.template operator()<std::int32_t>();
    case DType::uint64:
      return use.template operator()<std::uint64_t>();
    case DType::int64:
      return use.template operator()<std::int64_t>();
    case DType::float16:
      return use.template operator()<Float16>();
    case DType::bfloat16:
      return use.template operator()<BFloat16>();
    case DType::float32:
      return use.template operator()<float>();
    case DType::float64:
      return use.template operator()<double>();
    case DType::complex64:
      return use.template operator()<std::complex<float>>();
    case DType::complex128:
      return use.template operator()<std::complex<double>>();
    case DType::boolean:
      return use.template operator()<bool>();
    default:
      throw std::invalid_argument("no reduction has this dtype");
  }
}

template <class Element>
bool is_near(Element expected, Element found, double tolerance) {
  const auto a = Computed<Element>::from(expected);
  const auto b = Computed<Element>::from(found);
  if constexpr (std::is_integral_v<Element>)
    return a == b;
  else
    return std::abs(a - b) <= tolerance * (std::abs(a) + 16);
}

std::string hexadecimal(std::span<const std::byte> bytes) {
  std::string text;
  for (const auto byte : bytes) text += fmt::format("{:02x}", static_cast<unsigned>(byte));
  return text;
}

}  // namespace

Bytes reduce(std::span<const Bytes> inputs, DType dtype, ReduceOp op) {
  return with_element(dtype, [&]<class Element>() { return reduce_elements<Element>(inputs, op); });
}

std::string difference(std::span<const std::byte> expected, std::span<const std::byte> found, DType dtype,
                       double tolerance) {
  if (expected.size() != found.size())
    return fmt::format("{} bytes instead of {}", found.size(), expected.size());
  if (expected.empty() || std::memcmp(expected.data(), found.data(), found.size()) == 0) return {};
  const auto bytes = size_of(dtype);
  const auto elements = found.size() / bytes;
  const auto differs = [&](std::size_t at) {
    if (tolerance == 0) return std::memcmp(&expected[at * bytes], &found[at * bytes], bytes) != 0;
    return with_element(dtype, [&]<class Element>() {
      return !is_near(element_of<Element>(expected, at), element_of<Element>(found, at), tolerance);
    });
  };
  std::size_t first = 0, last = 0, count = 0;
  for (std::size_t at = 0; at < elements; ++at) {
    if (!differs(at)) continue;
    if (count++ == 0) first = at;
    last = at;
  }
  if (count == 0) return {};
  return fmt::format(
      "{} of {} elements differ, from {} to {}; the first is {} instead of {} (bytes in memory)", count,
      elements, first, last, hexadecimal(found.subspan(first * bytes, bytes)),
      hexadecimal(expected.subspan(first * bytes, bytes)));
}

}  // namespace accelmgr::collective::contract
