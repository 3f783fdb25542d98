#include "engine/checkpoint/safetensors_layout.hpp"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "support.hpp"

namespace accelmgr::checkpoint::test {
namespace {

using ::testing::HasSubstr;

std::string refusal(std::vector<TensorDescription> tensors,
                    std::map<std::string, std::string> metadata = {}) {
  return message_of<CheckpointError>([&] { SafetensorsLayout(std::move(tensors), std::move(metadata)); });
}

TEST(SafetensorsLayout, PlacesEveryElementAlignedAndWithoutGaps) {
  const SafetensorsLayout layout({{"flag", "BOOL", {3}, 3, {}},
                                  {"count", "I64", {}, 8, {}},
                                  {"half", "BF16", {3}, 6, {}},
                                  {"empty", "F32", {2, 0}, 0, {}},
                                  {"weight", "F32", {3, 1}, 12, {}},
                                  {"mask", "U8", {2}, 2, {}}});
  const auto begin = layout.offset(1);  // Elements of 8 bytes come first, then those of 4, 2 and 1.
  EXPECT_EQ(begin % 8, 0u);
  EXPECT_EQ(layout.offset(3), begin + 8);
  EXPECT_EQ(layout.offset(4), begin + 8);
  EXPECT_EQ(layout.offset(2), begin + 20);
  EXPECT_EQ(layout.offset(0), begin + 26);
  EXPECT_EQ(layout.offset(5), begin + 29);
  EXPECT_EQ(layout.total_bytes(), begin + 31);
  EXPECT_THROW(layout.offset(6), std::out_of_range);
}

TEST(SafetensorsLayout, HeaderIsPaddedJsonBehindItsLength) {
  for (const std::string name :
       {"a", "ab", "abc", "abcd", "abcde", "abcdef", "abcdefg", "\u00e4 \"x\" / y"}) {
    const SafetensorsLayout layout({{name, "F32", {2}, 8, {}}}, {{"kind", "test"}});
    std::string header(layout.offset(0), 'x');
    layout.write_header(reinterpret_cast<std::byte*>(header.data()));
    std::uint64_t length = 0;
    std::memcpy(&length, header.data(), 8);
    EXPECT_EQ(length + 8, header.size());
    EXPECT_EQ(header.size() % 8, 0u);
    EXPECT_EQ(header[8], '{');
    EXPECT_THAT(header.substr(header.find_last_of('}') + 1), ::testing::MatchesRegex(" *"));
    EXPECT_EQ(nlohmann::json::parse(header.substr(8)),
              (nlohmann::json{{"__metadata__", {{"kind", "test"}}},
                              {name, {{"dtype", "F32"}, {"shape", {2}}, {"data_offsets", {0, 8}}}}}));
  }
}

TEST(SafetensorsLayout, OfNothingIsAnEmptyFile) {
  const SafetensorsLayout layout({});
  EXPECT_EQ(layout.total_bytes(), 16u);
}

TEST(SafetensorsLayout, RefusesWhatTheFormatDoesNot) {
  EXPECT_THAT(refusal({{"w", "F31", {2}, 8, {}}}),
              HasSubstr("tensor 'w': unknown dtype 'F31'; known are F64"));
  EXPECT_THAT(refusal({{"w", "F32", {2, 3}, 20, {}}}), HasSubstr("'w': F32 [2, 3] needs 24 bytes, but 20"));
  EXPECT_THAT(refusal({{"w", "F32", {-2}, 8, {}}}), HasSubstr("has the size -2"));
  EXPECT_THAT(refusal({{"w", "F32", {1ll << 40, 1ll << 40}, 0, {}}}), HasSubstr("more bytes than a file"));
  EXPECT_THAT(refusal({{"w", "U8", {1}, 1, {}}, {"w", "U8", {1}, 1, {}}}), HasSubstr("named 'w'"));
  EXPECT_THAT(refusal({{"__metadata__", "U8", {1}, 1, {}}}), HasSubstr("named '__metadata__'"));
  EXPECT_THAT(refusal({{"w\xff", "U8", {1}, 1, {}}}), HasSubstr("UTF-8"));
  EXPECT_THAT(refusal({{"w", "U8", {1}, 1, {}}}, {{"k", "\xff"}}), HasSubstr("UTF-8"));
}

TEST(SafetensorsLayout, AliasesAreInTheMetadata) {
  const SafetensorsLayout layout({{"embedding", "U8", {1}, 1, {"head", "other"}}}, {{"kind", "test"}});
  std::string header(layout.offset(0), 'x');
  layout.write_header(reinterpret_cast<std::byte*>(header.data()));
  EXPECT_EQ(nlohmann::json::parse(header.substr(8))["__metadata__"],
            (nlohmann::json{{"kind", "test"}, {"head", "embedding"}, {"other", "embedding"}}));
  EXPECT_THAT(refusal({{"a", "U8", {1}, 1, {"b"}}, {"b", "U8", {1}, 1, {}}}), HasSubstr("named 'b'"));
  EXPECT_THAT(refusal({{"a", "U8", {1}, 1, {"b"}}}, {{"b", "x"}}), HasSubstr("metadata entry 'b'"));
}

}  // namespace
}  // namespace accelmgr::checkpoint::test
