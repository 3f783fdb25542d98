// Tests of the log tail: after the death of a process, at whatever instant it died, its last log lines can be
// read, and each of them is whole.
#include "base/log_tail.hpp"

#include <gmock/gmock.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <regex>

#include "base/log.hpp"

namespace accelmgr::base {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::EndsWith;
using testing::HasSubstr;
using testing::IsEmpty;

template <std::size_t size>
struct Ring {
  void append(std::string_view line) { append_to_tail(text, written, line); }
  std::vector<std::string> lines(std::size_t most = 100) const { return log_lines(text, written, most); }

  std::atomic<std::uint64_t> written{0};
  std::array<char, size> text{};
};

/// The lines of a ring to which these texts were appended.
template <std::size_t size>
std::vector<std::string> lines_after(std::initializer_list<std::string_view> texts) {
  Ring<size> ring;
  for (const auto text : texts) ring.append(text);
  return ring.lines();
}

TEST(LogTail, HoldsTheLastLines) {
  Ring<64> ring;
  EXPECT_THAT(ring.lines(), IsEmpty());
  for (const auto* line : {"one\n", "two\n", "three\n"}) ring.append(line);
  EXPECT_EQ(ring.written, 14u);
  EXPECT_THAT(ring.lines(), ElementsAre("one", "two", "three"));
  EXPECT_THAT(ring.lines(2), ElementsAre("two", "three"));
  EXPECT_THAT(ring.lines(0), IsEmpty());
}

TEST(LogTail, IsRightWhereverTheRingIsFull) {
  // The lengths of the lines vary, so that lines begin and end at every position of the ring.
  Ring<37> ring;
  std::vector<std::string> all;
  for (int i = 0; i < 500; ++i) {
    all.push_back(std::to_string(i) + std::string(static_cast<std::size_t>(i * 7 % 12), 'x'));
    ring.append(all.back() + "\n");
    const auto lines = ring.lines();
    ASSERT_LE(lines.size(), all.size());
    EXPECT_GE(lines.size(), i == 0 ? 1u : 2u);
    const std::vector<std::string> last(all.end() - static_cast<std::ptrdiff_t>(lines.size()), all.end());
    EXPECT_EQ(lines, last) << i;
  }
}

TEST(LogTail, ShowsTheEndOfALineThatIsLongerThanTheRing) {
  const std::string_view too_long = "a line that is far too long for it\n";
  EXPECT_THAT(lines_after<16>({"before\n", too_long}), ElementsAre("...oo long for it"));
  EXPECT_THAT(lines_after<16>({"before\n", too_long, "after\n"}), ElementsAre("after"));
  // The last 9 of 13 bytes: two bytes of a character, two whole characters, "\n".
  EXPECT_THAT(lines_after<10>({"\u20AC\u20AC\u20AC\u20AC\n"}), ElementsAre("...\uFFFD\u20AC\u20AC"));
  EXPECT_THAT(lines_after<1>({"line\n"}), IsEmpty());
}

TEST(LogTail, TakesAnyText) {
  EXPECT_THAT(lines_after<32>({"whole\n", "half"}), ElementsAre("whole"));
  EXPECT_THAT(lines_after<32>({"one\n\ntwo\n"}), ElementsAre("one", "", "two"));
  EXPECT_THAT(lines_after<32>({"one\n", std::string_view("t\0o\n", 4)}), ElementsAre("one", "t o"));
  EXPECT_THAT(lines_after<32>({"gr\u00FC\u00DFe \xE2\x82\n"}), ElementsAre("gr\u00FC\u00DFe \uFFFD"));
}

TEST(LogTail, OfBytesThatNobodyWroteIsReadWithoutHarm) {
  const std::string text = "\n\n\x01torn\0\xFFx\n";
  EXPECT_THAT(log_lines(text, ~std::uint64_t{0}, 10), testing::SizeIs(testing::Le(10u)));
  EXPECT_THAT(log_lines({}, 1000, 10), IsEmpty());
}

/// Appends lines for ever. Each states its number and its length: a test can tell whether it is whole.
[[noreturn]] void write_lines(std::span<char> text, std::atomic<std::uint64_t>& written) {
  for (unsigned i = 0;; ++i) {
    std::array<char, 64> line;
    line.fill('x');
    const unsigned length = 10 + i * 13 % 50;
    const int head = std::snprintf(line.data(), line.size(), "%05u %02u ", i % 100'000, length);
    line[static_cast<std::size_t>(head)] = 'x';
    line[length] = '\n';
    append_to_tail(text, written, {line.data(), length + 1});
  }
}

TEST(LogTail, OfAProcessKilledAtAnyInstantHoldsWholeLinesInOrder) {
  struct Shared {
    std::atomic<std::uint64_t> written;
    std::array<char, 200> text;
  };
  auto* mapping = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(mapping, MAP_FAILED);
  const std::regex whole("[0-9]{5} [0-9]{2} x*");
  for (unsigned kill_after = 1; kill_after <= 150; ++kill_after) {
    auto& shared = *new (mapping) Shared{};
    const pid_t child = fork();
    if (child == 0) write_lines(shared.text, shared.written);
    ASSERT_GT(child, 0);
    while (shared.written.load() < 1000 + 37 * kill_after) sched_yield();
    kill(child, SIGKILL);
    ASSERT_EQ(waitpid(child, nullptr, 0), child);
    const auto lines = log_lines(shared.text, shared.written, 100);
    ASSERT_THAT(lines, testing::SizeIs(testing::Ge(2u)));
    const auto first = std::stoul(lines.front());
    for (std::size_t i = 0; i < lines.size(); ++i) {
      EXPECT_EQ(std::stoul(lines[i]), (first + i) % 100'000) << lines[i];
      ASSERT_TRUE(std::regex_match(lines[i], whole)) << lines[i];
      EXPECT_EQ(lines[i].size(), std::stoul(lines[i].substr(6))) << lines[i];
    }
  }
  munmap(mapping, sizeof(Shared));
}

/// Logs to standard error at the level given to start(). Tests add a ring, ring_, that keeps the log tail.
class LogToTail : public testing::Test {
 protected:
  ~LogToTail() override {
    drop_log_tail();
    unsetenv("ACCELMGR_LOG_LEVEL");
  }
  void start(const char* level) {
    setenv("ACCELMGR_LOG_LEVEL", level, 1);
    start_logging("rank 3");
    set_log_step(5);
  }
  /// Logs a debug line, an info line and a warning; returns what standard error shows of them.
  std::string log_each_level() {
    testing::internal::CaptureStderr();
    log().debug("a debug");
    log().info("an info");
    log().warn("a warning");
    return testing::internal::GetCapturedStderr();
  }
  Ring<256> ring_;
};

TEST_F(LogToTail, HoldsInfoAndAboveWhereStandardErrorShowsLessOrIsOff) {
  for (const char* level : {"error", "off"}) {
    Ring<256> ring;
    start(level);
    keep_log_tail(ring.text, ring.written);
    EXPECT_EQ(log_each_level(), "");
    EXPECT_THAT(ring.lines(), ElementsAre(EndsWith(" info [rank 3 step 5] an info"),
                                          EndsWith(" warning [rank 3 step 5] a warning")));
    drop_log_tail();
  }
}

TEST_F(LogToTail, HoldsNoMoreWhereStandardErrorShowsMore) {
  start("debug");
  keep_log_tail(ring_.text, ring_.written);
  EXPECT_THAT(log_each_level(), AllOf(HasSubstr("a debug"), HasSubstr("an info"), HasSubstr("a warning")));
  EXPECT_THAT(ring_.lines(), ElementsAre(EndsWith("an info"), EndsWith("a warning")));
}

TEST_F(LogToTail, MayBeAskedForBeforeLoggingIsStarted) {
  keep_log_tail(ring_.text, ring_.written);
  start("warning");
  EXPECT_THAT(log_each_level(), EndsWith(" warning [rank 3 step 5] a warning\n"));
  EXPECT_THAT(ring_.lines(), ElementsAre(EndsWith(" info [rank 3 step 5] an info"),
                                         EndsWith(" warning [rank 3 step 5] a warning")));
}

TEST_F(LogToTail, HasOnePlaceTheLastAskedFor) {
  Ring<256> before;
  start("warning");
  keep_log_tail(before.text, before.written);
  keep_log_tail(ring_.text, ring_.written);
  EXPECT_THAT(log_each_level(), EndsWith("a warning\n"));
  EXPECT_EQ(before.written, 0u);
  EXPECT_EQ(ring_.lines().size(), 2u);
}

TEST_F(LogToTail, EndsWithoutAChangeToStandardError) {
  start("warning");
  keep_log_tail(ring_.text, ring_.written);
  drop_log_tail();
  EXPECT_THAT(log_each_level(), EndsWith(" warning [rank 3 step 5] a warning\n"));
  EXPECT_EQ(ring_.written, 0u);
  EXPECT_FALSE(log().shows(LogLevel::info)) << "nobody reads it: it is not to be formatted";
}

}  // namespace
}  // namespace accelmgr::base
