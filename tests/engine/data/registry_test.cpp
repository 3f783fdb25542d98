// Tests of register_data() and make_data(), which make a data source by its kind.
#include <algorithm>

#include "engine/data/fixtures.hpp"

namespace accelmgr::test {
namespace {

// Counts down from `elements` - 1.
class CountDown final : public BatchSource {
 public:
  explicit CountDown(std::int64_t elements, std::string field = "number")
      : left_(elements), fields_{{std::move(field), DType::int64, {}}} {}
  std::span<const FieldSpec> fields() const override { return fields_; }
  bool next(ElementWriter& element) override {
    if (left_ == 0) return false;
    --left_;
    std::memcpy(element.bytes(0).data(), &left_, sizeof left_);
    return true;
  }

 private:
  std::int64_t left_;
  std::vector<FieldSpec> fields_;
};

Config config_of_kind(const std::string& kind) {
  Config config;
  config.data.kind = kind;
  return config;
}

TEST(DataRegistry, KnowsTheBuiltInKinds) {
  const auto kinds = data_kinds();
  EXPECT_TRUE(std::ranges::is_sorted(kinds));
  EXPECT_TRUE(std::ranges::count(kinds, "synthetic") == 1 && std::ranges::count(kinds, "text") == 1);
}

TEST(DataRegistry, ARegisteredSourceIsMadeByNameFromItsConfiguration) {
  register_data("count_down", [](const Config& config) {
    return std::make_unique<CountDown>(std::stoll(config.data.options.at("from")));
  });
  const auto kinds = data_kinds();
  EXPECT_EQ(std::ranges::count(kinds, "count_down"), 1);
  Config config = config_of_kind("count_down");
  config.data.options["from"] = "3";
  const auto source = make_data(config);
  EXPECT_EQ(Reader(*source).take<std::int64_t>(), (std::vector<std::vector<std::int64_t>>{{2}, {1}, {0}}));
  EXPECT_EQ(source->held_out(), nullptr);
}

TEST(DataRegistry, AnUnknownKindIsRefusedWithTheNearestKnownOne) {
  const auto make = [] { make_data(config_of_kind("synthtic")); };
  expect_contains(message_of<ConfigError>(make),
                  {"data.kind", "'synthtic'", "did you mean 'synthetic'?", "text"});
  EXPECT_EQ(config_key_of(make), "data.kind");
}

TEST(DataRegistry, ATakenOrEmptyNameAndAnEmptyFactoryAreRefused) {
  const DataFactory factory = [](const Config&) { return std::make_unique<CountDown>(1); };
  expect_contains(message_of<UsageError>([&] { register_data("text", factory); }), {"'text'", "already"});
  register_data("taken", factory);
  expect_contains(message_of<UsageError>([&] { register_data("taken", factory); }), {"'taken'", "already"});
  expect_contains(message_of<UsageError>([&] { register_data("", factory); }), {"empty"});
  expect_contains(message_of<UsageError>([] { register_data("x", DataFactory()); }), {"'x'", "empty"});
}

TEST(DataRegistry, WhatAFactoryThrowsNamesTheSource) {
  register_data("throws", [](const Config&) -> std::unique_ptr<BatchSource> {
    throw std::runtime_error("the disk is on fire");
  });
  expect_contains(message_of<DataError>([] { make_data(config_of_kind("throws")); }),
                  {"'throws'", "the disk is on fire"});
}

TEST(DataRegistry, AFactoryThatMakesNothingOrDeclaresWrongFieldsIsRefused) {
  register_data("null", [](const Config&) { return std::unique_ptr<BatchSource>(); });
  expect_contains(message_of<DataError>([] { make_data(config_of_kind("null")); }), {"'null'", "null"});
  register_data("nameless", [](const Config&) { return std::make_unique<CountDown>(1, ""); });
  expect_contains(message_of<DataError>([] { make_data(config_of_kind("nameless")); }),
                  {"'nameless'", "without a name"});
}

}  // namespace
}  // namespace accelmgr::test
