#include "launcher/agent/line_prefixer.hpp"

#include <gtest/gtest.h>

namespace accelmgr::agent {
namespace {

std::string prefixed(std::initializer_list<std::string> pieces) {
  LinePrefixer lines("> ");
  std::string out;
  for (const auto& piece : pieces) lines.feed(piece, out);
  lines.finish(out);
  return out;
}

TEST(LinePrefixer, PutsThePrefixBeforeEveryLineHoweverTheBytesCome) {
  const std::string expected = "> one\n> \n> two\n";
  EXPECT_EQ(prefixed({"one\n\ntwo\n"}), expected);
  EXPECT_EQ(prefixed({"on", "e", "\n", "\nt", "wo\n"}), expected);
}

TEST(LinePrefixer, KeepsALineBackUntilItIsWhole) {
  LinePrefixer lines("> ");
  std::string out;
  lines.feed("begun", out);
  EXPECT_EQ(out, "");
  lines.feed(" and ended\nnext", out);
  EXPECT_EQ(out, "> begun and ended\n");
}

TEST(LinePrefixer, EndsALastLineWithoutAnEnd) { EXPECT_EQ(prefixed({"one\ntw", "o"}), "> one\n> two\n"); }

TEST(LinePrefixer, WithoutBytesThereAreNoLines) { EXPECT_EQ(prefixed({"", ""}), ""); }

TEST(LinePrefixer, CutsALineThatIsTooLongAndLosesNothing) {
  const std::string full(LinePrefixer::longest_line_bytes, 'x');
  EXPECT_EQ(prefixed({full + full, "y\n"}), "> " + full + "\n> " + full + "\n> y\n");
  EXPECT_EQ(prefixed({full + "y"}), "> " + full + "\n> y\n");
}

TEST(LinePrefixer, ALineThatIsJustFullIsOneLine) {
  const std::string full(LinePrefixer::longest_line_bytes, 'x');
  EXPECT_EQ(prefixed({full + "\n"}), "> " + full + "\n");
  EXPECT_EQ(prefixed({full, "\n"}), "> " + full + "\n");
}

}  // namespace
}  // namespace accelmgr::agent
