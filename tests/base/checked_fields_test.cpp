#include "base/checked_fields.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "accelmgr/errors.hpp"
#include "message_of.hpp"

namespace accelmgr::base {
namespace {

using nlohmann::json;
using test::message_of;

template <class Read>
std::string refusal(const json& object, Read read) {
  return message_of<SessionError>([&] { read(Fields(object, "a test")); });
}

TEST(Fields, GiveWhatIsThere) {
  const json object = {{"number", 7},
                       {"list", {1, 2}},
                       {"real", 2},
                       {"flag", true},
                       {"text", "words"},
                       {"texts", {"a", "b"}},
                       {"objects", {{{"n", 1}}, {{"n", 2}}}}};
  const Fields fields(object, "a test");
  EXPECT_EQ(fields.number<int>("number"), 7);
  EXPECT_EQ(fields.number<std::uint8_t>("number", 7, 7), 7);
  EXPECT_EQ(fields.numbers<std::int64_t>("list"), (std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ(fields.real("real"), 2.0);
  EXPECT_TRUE(fields.flag("flag"));
  EXPECT_EQ(fields.text("text"), "words");
  EXPECT_EQ(fields.texts("texts"), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(fields.objects("objects", 2)[1].number<int>("n"), 2);
  EXPECT_TRUE(fields.has("text"));
  EXPECT_FALSE(fields.has("other"));
}

TEST(Fields, ARefusalNamesTheMessageTheFieldWhatItIsAndWhatIsRight) {
  EXPECT_EQ(refusal({{"n", 8}}, [](const Fields& f) { f.number<int>("n", 1, 7); }),
            "a test: 'n' is 8; it must be an integer from 1 to 7");
  EXPECT_EQ(refusal({{"n", "8"}}, [](const Fields& f) { f.number<int>("n", 1, 7); }),
            "a test: 'n' is \"8\"; it must be an integer from 1 to 7");
  EXPECT_EQ(refusal({{"n", {1, 9}}}, [](const Fields& f) { f.numbers<int>("n", 1, 7); }),
            "a test: 'n' is 9; it must be an integer from 1 to 7");
  EXPECT_EQ(refusal({{"n", {1, 2}}}, [](const Fields& f) { f.numbers<int>("n", 1, 7, 1); }),
            "a test: 'n' is array of 2 entries; it must be a list of at most 1 entries");
  EXPECT_EQ(refusal({{"m", 1}}, [](const Fields& f) { f.text("n"); }), "a test: the field 'n' is missing");
  EXPECT_EQ(refusal({{"n", 1}}, [](const Fields& f) { f.text("n"); }),
            "a test: 'n' is 1; it must be a string");
  EXPECT_EQ(refusal({{"l", {1}}}, [](const Fields& f) { f.objects("l"); }),
            "a test: l[0] is 1; it must be an object with fields");
  EXPECT_EQ(refusal(json::array(), [](const Fields&) {}),
            "a test is array of 0 entries; it must be an object with fields");
}

TEST(Fields, NumbersAreIntegersOfTheirRange) {
  const auto refused = [](const json& value, auto of) {
    using T = decltype(of);
    const json object = {{"n", value}};
    EXPECT_THROW(Fields(object, "a test").number<T>("n"), SessionError) << value;
  };
  refused(-1, std::uint32_t{});
  refused(std::uint64_t{1} << 32, std::uint32_t{});
  refused(std::uint64_t{1} << 31, std::int32_t{});
  refused(~std::uint64_t{0}, std::int64_t{});
  refused(-129, std::int8_t{});
  refused(1.0, int{});
  refused(true, int{});
  refused(nullptr, int{});
  const json most = {{"n", ~std::uint64_t{0}}};
  EXPECT_EQ(Fields(most, "a test").number<std::uint64_t>("n"), ~std::uint64_t{0});
  const json least = {{"n", std::numeric_limits<std::int64_t>::min()}};
  EXPECT_EQ(Fields(least, "a test").number<std::int64_t>("n"), std::numeric_limits<std::int64_t>::min());
}

TEST(Fields, RealsAreFinite) {
  for (const double value : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
    const json object = {{"r", value}};
    EXPECT_THROW(Fields(object, "a test").real("r"), SessionError) << value;
  }
}

TEST(Fields, WhatCannotBeReadOrIsNestedTooDeepIsAnError) {
  EXPECT_THROW(parse_json("{", "a test"), SessionError);
  EXPECT_THROW(parse_json("", "a test"), SessionError);
  EXPECT_THROW(parse_json("\"\xff\"", "a test"), SessionError);
  EXPECT_THROW(parse_cbor("\xff", "a test"), SessionError);
  const auto nested = [](std::size_t levels) { return std::string(levels, '[') + std::string(levels, ']'); };
  EXPECT_NO_THROW(parse_json(nested(max_nesting), "a test"));
  EXPECT_THROW(parse_json(nested(max_nesting + 1), "a test"), SessionError);
  EXPECT_THROW(parse_cbor(std::string(1'000'000, '\x81'), "a test"), SessionError);
}

}  // namespace
}  // namespace accelmgr::base
