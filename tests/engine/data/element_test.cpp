#include "engine/data/element.hpp"

#include "engine/data/fixtures.hpp"

namespace accelmgr::test {
namespace {

TEST(FieldSpec, BytesAreThoseOfOneElement) {
  EXPECT_EQ((FieldSpec{"x", DType::float32, {3, 4, 5}}.bytes()), 240U);
  EXPECT_EQ((FieldSpec{"x", DType::int64, {}}.bytes()), 8U);
  EXPECT_EQ((FieldSpec{"x", DType::boolean, {7}}.bytes()), 7U);
  EXPECT_EQ((FieldSpec{"x", DType::bfloat16, {3}}.bytes()), 6U);
  EXPECT_EQ((FieldSpec{"x", DType::complex128, {2}}.bytes()), 32U);
  EXPECT_EQ((FieldSpec{"x", DType::float64, {0, 4}}.bytes()), 0U);
}

TEST(FieldSpec, NegativeOrOverflowingShapesAreRefusedByName) {
  expect_contains(message_of<DataError>([] {
                    FieldSpec{"mask", DType::float32, {3, -1}}.bytes();
                  }),
                  {"'mask'", "float32 [3, -1]"});
  const std::int64_t huge = std::int64_t{1} << 40;
  expect_contains(message_of<DataError>([&] {
                    FieldSpec{"mask", DType::float32, {huge, huge}}.bytes();
                  }),
                  {"'mask'"});
}

TEST(FieldSpec, ADtypeThatIsNoneIsRefusedByName) {
  for (const std::size_t number : {dtype_count, std::size_t{255}}) {
    const FieldSpec field{"mask", static_cast<DType>(number), {3}};
    expect_contains(message_of<DataError>([&] { field.bytes(); }),
                    {"'mask'", std::to_string(number) + " is not the number of a dtype"});
  }
}

TEST(Fields, ADeclarationWithoutFieldsOrNamesOrWithTwinsIsRefused) {
  const auto check = [](std::vector<FieldSpec> fields) { data::check_fields(fields); };
  EXPECT_NO_THROW(check({{"a", DType::float32, {1}}, {"b", DType::float32, {}}}));
  expect_contains(message_of<DataError>([&] { check({}); }), {"at least one field"});
  expect_contains(message_of<DataError>([&] { check({{"", DType::float32, {1}}}); }), {"without a name"});
  expect_contains(message_of<DataError>([&] {
                    check({{"a", DType::float32, {1}}, {"a", DType::int64, {}}});
                  }),
                  {"'a'", "twice"});
}

}  // namespace
}  // namespace accelmgr::test
