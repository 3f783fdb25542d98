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
  FieldSpec field{"x", at::kFloat, {3}};
  EXPECT_EQ(field.dtype, DType::float32);
  EXPECT_EQ(field.dtype, at::kFloat);
  EXPECT_NE(field.dtype, at::kDouble);
  EXPECT_NE(field.dtype, at::kQUInt8);
  EXPECT_EQ(field.dtype, FieldSpec{.name = "default"}.dtype);
  field.dtype = at::kBFloat16;
  EXPECT_EQ(field.bytes(), 6U);
  const at::ScalarType type = field.dtype;
  EXPECT_EQ(type, at::kBFloat16);
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
  Element element({{"a", at::kLong, {2}}, {"b", at::kFloat, {2, 3}}, {"c", at::kDouble, {}}});
  auto writer = element.writer();
  writer.set(0, at::full({2}, 5, at::kLong));
  writer.set(1, at::arange(6, at::kFloat).reshape({2, 3}));
  writer.set(2, at::full({}, 2.5, at::kDouble));
  EXPECT_EQ(reinterpret_cast<const std::int64_t*>(element.memory[0].data())[1], 5);
  for (int i = 0; i < 6; ++i) EXPECT_EQ(reinterpret_cast<const float*>(element.memory[1].data())[i], i);
  EXPECT_EQ(*reinterpret_cast<const double*>(element.memory[2].data()), 2.5);
}

TEST(ElementWriter, SetTakesTheValuesOfAViewAndNotItsMemory) {
  Element element({{"x", at::kFloat, {3, 2}}});
  element.writer().set(0, at::arange(6, at::kFloat).reshape({2, 3}).t());
  const auto* values = reinterpret_cast<const float*>(element.memory[0].data());
  EXPECT_EQ(std::vector<float>(values, values + 6), (std::vector<float>{0, 3, 1, 4, 2, 5}));
}

TEST(ElementWriter, SetTakesTheValuesOfAConjugatedView) {
  Element element({{"x", at::kComplexDouble, {1}}});
  element.writer().set(0, at::full({1}, c10::complex<double>(1, 2), at::kComplexDouble).conj());
  EXPECT_EQ(reinterpret_cast<const double*>(element.memory[0].data())[1], -2);
}

TEST(ElementWriter, AnotherDtypeIsRefusedWithFieldAndBothDtypes) {
  Element element({{"x", at::kFloat, {3}}, {"target", at::kLong, {}}});
  expect_contains(message_of<DataError>([&] { element.writer().set(1, at::zeros({}, at::kInt)); }),
                  {"'target'", "expected int64 []", "got int32 []"});
  expect_contains(message_of<DataError>([&] { element.writer().set(1, at::empty({2}, at::kBits8)); }),
                  {"'target'", "got bits8 [2]"});
}

TEST(ElementWriter, AnotherShapeIsRefusedWithFieldAndBothShapes) {
  Element element({{"x", at::kFloat, {3, 4}}});
  expect_contains(message_of<DataError>([&] {
                    element.writer().set(0, at::zeros({4, 3}));
                  }),
                  {"'x'", "float32 [3, 4]", "float32 [4, 3]"});
  expect_contains(message_of<DataError>([&] {
                    element.writer().set(0, at::zeros({1, 3, 4}));
                  }),
                  {"[1, 3, 4]"});
}

TEST(ElementWriter, ARefusedTensorChangesNothing) {
  Element element({{"x", at::kFloat, {2}}});
  EXPECT_THROW(element.writer().set(0, at::ones({3})), DataError);
  EXPECT_EQ(element.memory[0], std::vector<std::byte>(8));
}

TEST(ElementWriter, UndefinedTensorsUnknownFieldsAndOtherDevicesAreRefused) {
  Element element({{"x", at::kFloat, {2}}});
  expect_contains(message_of<DataError>([&] { element.writer().set(0, at::Tensor()); }),
                  {"'x'", "undefined"});
  expect_contains(message_of<DataError>([&] { element.writer().set(1, at::zeros({2})); }),
                  {"field 1", "1 field"});
  expect_contains(message_of<DataError>([&] { element.writer().set(0, at::zeros({2}).to_sparse()); }),
                  {"'x'", "Sparse"});
  expect_contains(
      message_of<DataError>([&] { element.writer().set(0, at::zeros({2}, at::TensorOptions(at::kMeta))); }),
      {"'x'", "CPU"});
}

}  // namespace
}  // namespace accelmgr::test
