#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/complex.h>

#include "engine/data/fixtures.hpp"

namespace accelmgr::test {
namespace {

struct Element {
  std::vector<FieldSpec> fields;
  std::vector<std::vector<std::byte>> memory;

  explicit Element(std::vector<FieldSpec> specs) : fields(std::move(specs)) {
    for (const auto& field : fields) memory.emplace_back(field.bytes());
  }
  ElementWriter writer() { return {fields, {memory.begin(), memory.end()}}; }
};

TEST(FieldSpec, TakesAndGivesTheDtypesOfTorch) {
  const FieldSpec field{"x", at::kBFloat16, {3}};
  EXPECT_EQ(field.dtype, DType::bfloat16);
  EXPECT_EQ(field.dtype, at::kBFloat16);
  EXPECT_NE(field.dtype, at::kQUInt8);
  EXPECT_EQ(FieldSpec{.name = "default"}.dtype, at::kFloat);
  EXPECT_EQ(field.bytes(), 6U);
  EXPECT_EQ(at::zeros({1}, at::TensorOptions().dtype(field.dtype)).scalar_type(), at::kBFloat16);
  EXPECT_EQ(at::zeros({1}).to(field.dtype).scalar_type(), at::kBFloat16);
}

TEST(FieldSpec, ADtypeThatAFieldCannotHaveIsRefused) {
  const auto refused = [](at::ScalarType dtype) {
    return message_of<DataError>([&] { FieldSpec{"x", dtype, {3}}; });
  };
  expect_contains(refused(at::kQUInt8), {"QUInt8", "not supported"});
  expect_contains(refused(at::ScalarType::Undefined), {"not supported"});
}

TEST(ElementWriter, SetCopiesTheTensorIntoTheRowOfItsField) {
  Element element({{"a", at::kLong, {2}}, {"b", at::kFloat, {3, 2}}, {"c", at::kComplexDouble, {1}}});
  auto writer = element.writer();
  writer.set(0, at::full({2}, 5, at::kLong));
  writer.set(1, at::arange(6, at::kFloat).reshape({2, 3}).t());
  writer.set(2, at::full({1}, c10::complex<double>(1, 2), at::kComplexDouble).conj());
  EXPECT_EQ(reinterpret_cast<const std::int64_t*>(element.memory[0].data())[1], 5);
  const auto* values = reinterpret_cast<const float*>(element.memory[1].data());
  EXPECT_EQ(std::vector<float>(values, values + 6), (std::vector<float>{0, 3, 1, 4, 2, 5}));
  EXPECT_EQ(reinterpret_cast<const double*>(element.memory[2].data())[1], -2);
}

TEST(ElementWriter, WhatDoesNotFitIsRefusedWithItsFieldAndChangesNothing) {
  Element element({{"x", at::kFloat, {2}}});
  const auto refused = [&](const at::Tensor& tensor, std::size_t field = 0) {
    const auto text = message_of<DataError>([&] { element.writer().set(field, tensor); });
    EXPECT_EQ(element.memory[0], std::vector<std::byte>(8)) << text;
    return text;
  };
  expect_contains(refused(at::ones({2}, at::kInt)), {"'x'", "expected float32 [2]", "got int32 [2]"});
  expect_contains(refused(at::empty({2}, at::kBits8)), {"'x'", "got bits8 [2]"});
  expect_contains(refused(at::ones({1, 2})), {"'x'", "float32 [1, 2]"});
  expect_contains(refused(at::Tensor()), {"'x'", "undefined"});
  expect_contains(refused(at::ones({2}), 1), {"field 1", "1 field"});
  expect_contains(refused(at::ones({2}).to_sparse()), {"'x'", "Sparse"});
  expect_contains(refused(at::ones({2}, at::TensorOptions(at::kMeta))), {"'x'", "CPU"});
}

}  // namespace
}  // namespace accelmgr::test
