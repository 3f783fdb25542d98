#include "oracle.hpp"

#include <fmt/format.h>

#include <cmath>
#include <cstring>

#include "launcher/collective/oracle.hpp"

namespace accelmgr::collective::contract {
namespace {

using test::BFloat16;
using test::Float16;

template <class Element>
Element element_of(std::span<const std::byte> bytes, std::size_t at) {
  Element element;
  std::memcpy(&element, bytes.data() + at * sizeof(Element), sizeof(Element));
  return element;
}

template <class Element>
bool is_near(Element expected, Element found, double tolerance) {
  if constexpr (std::is_same_v<Element, Float16> || std::is_same_v<Element, BFloat16>)
    return is_near(test::from_half(expected), test::from_half(found), tolerance);
  else if constexpr (std::is_integral_v<Element>)
    return expected == found;
  else
    return std::abs(expected - found) <= tolerance * (std::abs(expected) + 16);
}

std::string hexadecimal(std::span<const std::byte> bytes) {
  std::string text;
  for (const auto byte : bytes) text += fmt::format("{:02x}", static_cast<unsigned>(byte));
  return text;
}

}  // namespace

Bytes reduce(std::span<const Bytes> inputs, DType dtype, ReduceOp op) {
  std::vector<const unsigned char*> operands;
  for (const auto& input : inputs) operands.push_back(reinterpret_cast<const unsigned char*>(input.data()));
  Bytes result(inputs[0].size());
  test::with_type(dtype, [&](auto element) {
    test::reduce_elements<decltype(element)>(op, operands, reinterpret_cast<unsigned char*>(result.data()),
                                             result.size() / sizeof element, operands.size());
  });
  return result;
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
    return test::with_type(dtype, [&](auto element) {
      using Element = decltype(element);
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
