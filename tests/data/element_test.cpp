#include "data/element.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/util/complex.h>

#include "data/fixtures.hpp"

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

TEST(FieldSpec, BytesAreThoseOfOneElement) {
  EXPECT_EQ((FieldSpec{"x", at::kFloat, {3, 4, 5}}.bytes()), 240U);
  EXPECT_EQ((FieldSpec{"x", at::kLong, {}}.bytes()), 8U);
  EXPECT_EQ((FieldSpec{"x", at::kBool, {7}}.bytes()), 7U);
  EXPECT_EQ((FieldSpec{"x", at::kBFloat16, {3}}.bytes()), 6U);
  EXPECT_EQ((FieldSpec{"x", at::kComplexDouble, {2}}.bytes()), 32U);
  EXPECT_EQ((FieldSpec{"x", at::kDouble, {0, 4}}.bytes()), 0U);
}

TEST(FieldSpec, NegativeOrOverflowingShapesAreRefusedByName) {
  expect_contains(message_of<DataError>([] {
                    FieldSpec{"mask", at::kFloat, {3, -1}}.bytes();
                  }),
                  {"'mask'", "float32 [3, -1]"});
  const std::int64_t huge = std::int64_t{1} << 40;
  expect_contains(message_of<DataError>([&] {
                    FieldSpec{"mask", at::kFloat, {huge, huge}}.bytes();
                  }),
                  {"'mask'"});
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

TEST(Fields, ADeclarationWithoutFieldsOrNamesOrWithTwinsIsRefused) {
  const auto check = [](std::vector<FieldSpec> fields) { data::check_fields(fields); };
  EXPECT_NO_THROW(check({{"a", at::kFloat, {1}}, {"b", at::kFloat, {}}}));
  expect_contains(message_of<DataError>([&] { check({}); }), {"at least one field"});
  expect_contains(message_of<DataError>([&] { check({{"", at::kFloat, {1}}}); }), {"without a name"});
  expect_contains(message_of<DataError>([&] {
                    check({{"a", at::kFloat, {1}}, {"a", at::kLong, {}}});
                  }),
                  {"'a'", "twice"});
}

}  // namespace
}  // namespace accelmgr::test
