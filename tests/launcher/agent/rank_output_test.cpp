#include "launcher/agent/rank_output.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <sstream>

#include "accelmgr/errors.hpp"
#include "launcher/agent/terminal.hpp"
#include "message_of.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::agent {
namespace {

/// Replaces standard output by a pipe for its lifetime.
class CapturedOutput {
 public:
  CapturedOutput() : saved_(base::duplicate(STDOUT_FILENO)) {
    std::fflush(stdout);
    int ends[2];
    if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) throw SystemError("pipe", errno);
    read_end_.reset(ends[0]);
    dup2(ends[1], STDOUT_FILENO);
    close(ends[1]);
    fcntl(STDOUT_FILENO, F_SETFL, 0);
  }
  ~CapturedOutput() { dup2(saved_.get(), STDOUT_FILENO); }

  std::string read_some(std::size_t bytes = 1 << 20) {
    std::string text(bytes, '\0');
    const auto count = read(read_end_.get(), text.data(), text.size());
    text.resize(count > 0 ? static_cast<std::size_t>(count) : 0);
    return text;
  }

 private:
  base::UniqueFd saved_, read_end_;
};

void write_text(int fd, const std::string& text) {
  ASSERT_EQ(write(fd, text.data(), text.size()), static_cast<ssize_t>(text.size()));
}

std::string content_of(const std::filesystem::path& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

TEST(RankOutput, LinesGoToTheTerminalAndBytesIntoTheFile) {
  const test::TemporaryFolder folder;
  const auto log = folder / "log";
  {
    CapturedOutput captured;
    Terminal terminal;
    RankOutput output(STDOUT_FILENO, "[rank 3] ", log);
    write_text(output.write_end(), "one\ntwo");
    EXPECT_TRUE(output.take(terminal));
    EXPECT_EQ(captured.read_some(), "[rank 3] one\n");
    output.finish(terminal);
    EXPECT_EQ(captured.read_some(), "[rank 3] two\n");
  }
  EXPECT_EQ(content_of(log), "one\ntwo");
}

TEST(RankOutput, TheEndIsTakenThoughSomebodyStillHoldsThePipe) {
  CapturedOutput captured;
  Terminal terminal;
  RankOutput output(STDOUT_FILENO, "", {});
  const auto held = base::duplicate(output.write_end());
  write_text(held.get(), "last");
  output.finish(terminal);
  EXPECT_EQ(captured.read_some(), "last\n");
  EXPECT_EQ(output.read_end(), -1);
}

TEST(RankOutput, TakeTellsTheEnd) {
  Terminal terminal;
  RankOutput output(STDOUT_FILENO, "", {});
  EXPECT_TRUE(output.take(terminal));  // Nothing to read, but the writer is still there.
  output.close_write_end();
  EXPECT_FALSE(output.take(terminal));
}

TEST(RankOutput, KeepsTheLastLines) {
  CapturedOutput captured;
  Terminal terminal;
  RankOutput output(STDOUT_FILENO, "", {});
  write_text(output.write_end(), "one\ntwo\nthree\n");
  output.finish(terminal);
  EXPECT_THAT(output.last_lines(2), testing::ElementsAre("two", "three"));
}

TEST(RankOutput, AFileThatCannotBeMadeIsNamed) {
  EXPECT_THAT(test::message_of<SystemError>([] { RankOutput(STDOUT_FILENO, "", "/nowhere/stdout.log"); }),
              testing::HasSubstr("/nowhere/stdout.log"));
}

TEST(Terminal, DoesNotWaitForAReaderThatReadsNothing) {
  CapturedOutput captured;
  Terminal terminal;
  const std::string much(1 << 20, 'x');
  terminal.write(STDOUT_FILENO, much);  // More than a pipe holds.
  EXPECT_GT(terminal.pending(), 0U);
  std::size_t read = 0;
  while (read < much.size()) {
    read += captured.read_some().size();
    terminal.pump();
  }
  EXPECT_EQ(terminal.pending(), 0U);
}

TEST(Terminal, AFlushEndsAtItsDeadline) {
  CapturedOutput captured;
  Terminal terminal;
  terminal.write(STDOUT_FILENO, std::string(1 << 20, 'x'));
  terminal.flush(base::Deadline::in_seconds(0.01));
  EXPECT_GT(terminal.pending(), 0U);
}

}  // namespace
}  // namespace accelmgr::agent
