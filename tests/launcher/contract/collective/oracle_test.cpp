// Tests of the oracle itself, with results that were computed by hand.
#include "oracle.hpp"

#include <gtest/gtest.h>

#include <complex>
#include <cstring>

#include "call.hpp"

namespace accelmgr::collective::contract {
namespace {

template <class Element>
Bytes bytes_of(const std::vector<Element>& elements) {
  Bytes bytes(elements.size() * sizeof(Element));
  std::memcpy(bytes.data(), elements.data(), bytes.size());
  return bytes;
}

/// The bits of the reduction of `operands`.
std::uint16_t halves(DType dtype, ReduceOp op, std::vector<std::uint16_t> operands) {
  std::vector<Bytes> inputs;
  for (const auto operand : operands) inputs.push_back(bytes_of<std::uint16_t>({operand}));
  const auto result = reduce(inputs, dtype, op);
  std::uint16_t bits = 0;
  std::memcpy(&bits, result.data(), sizeof bits);
  return bits;
}

template <class Element>
void expect_reduced(DType dtype, ReduceOp op, std::vector<Element> a, std::vector<Element> b,
                    std::vector<Element> result) {
  const Bytes inputs[] = {bytes_of(a), bytes_of(b)};
  EXPECT_EQ(difference(bytes_of(result), reduce(inputs, dtype, op), dtype), "")
      << name_of(op) << " of " << name_of(dtype);
}

TEST(Oracle, WrapsIntegersAround) {
  expect_reduced<std::int8_t>(DType::int8, ReduceOp::sum, {127, -128}, {1, -1}, {-128, 127});
  expect_reduced<std::int32_t>(DType::int32, ReduceOp::product, {1 << 30, -3}, {4, 5}, {0, -15});
  expect_reduced<std::uint64_t>(DType::uint64, ReduceOp::sum, {~0ULL}, {2}, {1});
  expect_reduced<std::uint16_t>(DType::uint16, ReduceOp::max, {65535, 1}, {2, 3}, {65535, 3});
  expect_reduced<std::int16_t>(DType::int16, ReduceOp::min, {-1, 1}, {2, 3}, {-1, 1});
  expect_reduced<std::uint8_t>(DType::uint8, ReduceOp::bit_and, {0xf0}, {0x3c}, {0x30});
  expect_reduced<std::uint8_t>(DType::uint8, ReduceOp::bit_or, {0xf0}, {0x3c}, {0xfc});
}

TEST(Oracle, ComputesFloatingPointAndComplexNumbers) {
  expect_reduced<float>(DType::float32, ReduceOp::avg, {1, 3}, {2, 4}, {1.5, 3.5});
  expect_reduced<double>(DType::float64, ReduceOp::product, {0.5}, {-3}, {-1.5});
  expect_reduced<std::complex<float>>(DType::complex64, ReduceOp::product, {{1, 2}}, {{3, 4}}, {{-5, 10}});
  expect_reduced<std::complex<double>>(DType::complex128, ReduceOp::avg, {{1, 2}}, {{3, 4}}, {{2, 3}});
}

TEST(Oracle, TakesReductionsOfBooleansForDisjunctionAndConjunction) {
  using enum ReduceOp;
  for (const auto op : {sum, bit_or, max})
    expect_reduced<std::uint8_t>(DType::boolean, op, {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 1, 1, 1});
  for (const auto op : {product, bit_and, min})
    expect_reduced<std::uint8_t>(DType::boolean, op, {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 1});
}

TEST(Oracle, RoundsSixteenBitsToTheNearestAndTiesToEven) {
  using enum ReduceOp;
  EXPECT_EQ(halves(DType::float16, sum, {0x3c00, 0x3c00}), 0x4000);          // 1 + 1 = 2
  EXPECT_EQ(halves(DType::float16, product, {0x3e00, 0xc000}), 0xc200);      // 1.5 x -2 = -3
  EXPECT_EQ(halves(DType::float16, sum, {0x7bff, 0x7bff}), 0x7c00);          // 65504 + 65504 = infinity
  EXPECT_EQ(halves(DType::float16, sum, {0x0001, 0x0001}), 0x0002);          // The smallest, twice.
  EXPECT_EQ(halves(DType::float16, avg, {0x0400, 0x0000}), 0x0200);          // Half the smallest normal one.
  EXPECT_EQ(halves(DType::float16, sum, {0x3c00, 0x1000}), 0x3c00);          // 1 + half an ulp: even is below
  EXPECT_EQ(halves(DType::float16, sum, {0x3c01, 0x1000}), 0x3c02);          // and above.
  EXPECT_EQ(halves(DType::float16, sum, {0x3fff, 0x1000}), 0x4000);          // Carries into the exponent.
  EXPECT_EQ(halves(DType::float16, sum, {0x3c00, 0x1000, 0x1000}), 0x3c01);  // Rounded once.
  EXPECT_EQ(halves(DType::bfloat16, sum, {0x3f80, 0x3f80}), 0x4000);
  EXPECT_EQ(halves(DType::bfloat16, sum, {0x3f80, 0x3b80}), 0x3f80);
  EXPECT_EQ(halves(DType::bfloat16, max, {0xbf80, 0xff80}), 0xbf80);  // -1 and -infinity
}

TEST(Oracle, KeepsEverySixteenBitNumberThatIsOne) {
  for (const auto dtype : {DType::float16, DType::bfloat16}) {
    const unsigned infinity = dtype == DType::float16 ? 0x7c00 : 0x7f80;
    for (unsigned bits = 0; bits < 0x10000; ++bits) {
      if ((bits & 0x7fff) > infinity) continue;  // NaN.
      const auto same = static_cast<std::uint16_t>(bits);
      ASSERT_EQ(halves(dtype, ReduceOp::max, {same, same}), same);
    }
  }
}

TEST(Oracle, FindsADifferenceAndItsPlace) {
  const auto expected = bytes_of<std::int16_t>({1, 2, 3, 4});
  EXPECT_EQ(difference(expected, expected, DType::int16), "");
  const auto what = difference(expected, bytes_of<std::int16_t>({1, 5, 3, 5}), DType::int16);
  EXPECT_NE(what.find("2 of 4 elements differ, from 1 to 3; the first is 0500 instead of 0200"),
            std::string::npos)
      << what;
  EXPECT_NE(difference(expected, bytes_of<std::int16_t>({1}), DType::int16), "");
}

TEST(Oracle, WithAToleranceTakesWhatIsNear) {
  const auto expected = bytes_of<float>({1, 100});
  EXPECT_EQ(difference(expected, bytes_of<float>({1.00001f, 100.00001f}), DType::float32, 1e-6), "");
  EXPECT_NE(difference(expected, bytes_of<float>({1.001f, 100}), DType::float32, 1e-6), "");
  EXPECT_NE(difference(bytes_of<std::int32_t>({1}), bytes_of<std::int32_t>({2}), DType::int32, 0.5), "");
}

}  // namespace
}  // namespace accelmgr::collective::contract
