#include "base/utf8.hpp"

#include <gtest/gtest.h>

namespace accelmgr::base {
namespace {

TEST(Utf8, ThatIsValidStaysAsItIs) {
  using namespace std::string_literals;
  // The first and last characters of each encoded length, and those next to the surrogates.
  for (const auto& text : {""s, "plain\n\x7F"s, "\0"s, "\u0080\u07FF"s, "\u0800\uFFFF"s, "\uD7FF\uE000"s,
                           "\U00010000\U0010FFFF"s})
    EXPECT_EQ(valid_utf8(text), text);
}

TEST(Utf8, ThatIsTornIsReplacedOnceARun) {
  EXPECT_EQ(valid_utf8("a\xE2\x82"), "a\uFFFD");            // The end of a character is missing.
  EXPECT_EQ(valid_utf8("\x82\xACz"), "\uFFFDz");            // The beginning is missing.
  EXPECT_EQ(valid_utf8("\xE2\x82\u20AC"), "\uFFFD\u20AC");  // The end is missing; a whole one follows.
  EXPECT_EQ(valid_utf8("\xF0\x9F\x98!\x80"), "\uFFFD!\uFFFD");
}

TEST(Utf8, HasNoOverlongFormsNoSurrogatesAndNothingPastTheLastCharacter) {
  for (const char* text : {"\xC0\xAF", "\xC1\xBF", "\xE0\x9F\xBF", "\xF0\x8F\xBF\xBF", "\xED\xA0\x80",
                           "\xED\xBF\xBF", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF", "\xFE"})
    EXPECT_EQ(valid_utf8(text), "\uFFFD");
}

}  // namespace
}  // namespace accelmgr::base
