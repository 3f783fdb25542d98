// Tests of the small parts of base: hashes, nearest names, deadlines, descriptors, SystemError and the log.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <limits>
#include <string>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/did_you_mean.hpp"
#include "base/fnv1a.hpp"
#include "base/log.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::base {
namespace {

const std::vector<std::string> known{"model.kind", "model.file", "data.kind", "nprocs"};

// The expected values are those of the test suite of the hash's authors (Fowler, Noll, Vo).
TEST(Fnv1a, OfTexts) {
  EXPECT_EQ(fnv1a(""), 0xcbf29ce484222325u);
  EXPECT_EQ(fnv1a("a"), 0xaf63dc4c8601ec8cu);
  EXPECT_EQ(fnv1a("foobar"), 0x85944171f73967e8u);
}

TEST(Fnv1a, OfNumbersDependsOnTheirOrder) {
  EXPECT_EQ(fnv1a({'a'}), fnv1a("a"));
  EXPECT_NE(fnv1a({1, 2}), fnv1a({2, 1}));
}

TEST(Nearest, FindsWhatWasMeant) {
  EXPECT_EQ(nearest("modle.kind", known), "model.kind");
  EXPECT_EQ(nearest("nproc", known), "nprocs");
  EXPECT_EQ(did_you_mean("data.knd", known), "; did you mean 'data.kind'?");
}

TEST(Nearest, SaysNothingWhenNothingIsNear) {
  EXPECT_EQ(nearest("learning_rate", known), "");
  EXPECT_EQ(did_you_mean("learning_rate", known), "");
}

TEST(Deadline, OfAnyNumberOfSecondsIsInTheFuture) {
  for (const double seconds :
       {1e10, 1e12, std::numeric_limits<double>::max(), std::numeric_limits<double>::infinity()})
    EXPECT_GT(Deadline::in_seconds(seconds).ns(), now_ns()) << seconds;
  EXPECT_FALSE(Deadline::in_seconds(1000).passed());
  EXPECT_LE(Deadline::in_seconds(1).remaining_ns(), 1'000'000'000);
}

TEST(Deadline, OfNoTimeHasPassed) {
  for (const double seconds :
       {0.0, -1.0, -1e12, -std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()})
    EXPECT_TRUE(Deadline::in_seconds(seconds).passed()) << seconds;
}

TEST(UniqueFd, ClosesWhatItOwnsOnce) {
  const int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
  {
    UniqueFd first(fd);
    UniqueFd second(std::move(first));
    EXPECT_EQ(first.get(), -1);
    EXPECT_EQ(second.get(), fd);
  }
  EXPECT_EQ(fcntl(fd, F_GETFD), -1);
}

TEST(UniqueFd, ADuplicateOutlivesWhatItIsOfAndIsClosedOnExec) {
  UniqueFd file(open("/dev/null", O_RDONLY));
  const auto copy = duplicate(file.get());
  file.reset();
  EXPECT_EQ(fcntl(copy.get(), F_GETFD), FD_CLOEXEC);
}

TEST(UniqueFd, WhatCannotBeDuplicatedIsToldByItsNumber) {
  try {
    duplicate(-1);
    FAIL() << "nothing was thrown";
  } catch (const SystemError& error) {
    EXPECT_EQ(error.code(), EBADF);
    EXPECT_NE(std::string(error.what()).find("duplicating descriptor -1"), std::string::npos);
  }
}

TEST(SystemError, NamesTheCallAndTheReason) {
  const SystemError error("opening /nope", ENOENT);
  EXPECT_STREQ(error.what(), "opening /nope: No such file or directory (errno 2)");
  EXPECT_EQ(error.code(), ENOENT);
}

TEST(SystemError, SaysWhichLimitToRaise) {
  rlimit files{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &files), 0);
  EXPECT_EQ(
      SystemError("opening /here", EMFILE).what(),
      fmt::format("opening /here: Too many open files: raise ulimit -n (now {}) (errno 24)", files.rlim_cur));
}

/// All that can be read from a pipe now.
std::string read_now(int fd) {
  std::string text;
  char part[4096];
  for (ssize_t bytes; (bytes = read(fd, part, sizeof part)) > 0;)
    text.append(part, static_cast<std::size_t>(bytes));
  return text;
}

TEST(Log, ThatNobodyReadsHoldsUpNoManager) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    int ends[2];
    if (pipe2(ends, O_NONBLOCK) != 0) _exit(1);
    const std::string junk(4096, '.');
    while (write(ends[1], junk.data(), junk.size()) > 0) {
    }
    fcntl(ends[1], F_SETFL, 0);  // As standard error is: writing blocks.
    dup2(ends[1], STDERR_FILENO);
    start_logging("manager");
    for (int i = 0; i < 100; ++i) log().warn("line {}", i);
    if (read_now(ends[0]).find("line") != std::string::npos) _exit(2);
    log().warn("the last one");
    const auto said = read_now(ends[0]);
    const bool tells = said.find("100 lines of the log are left out here") != std::string::npos;
    _exit(tells && said.find("the last one") != std::string::npos ? 0 : 3);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(Log, LinesCarryProcessAndStepAndTheLevelComesFromTheEnvironment) {
  setenv("ACCELMGR_LOG_LEVEL", "info", 1);
  testing::internal::CaptureStderr();
  start_logging("rank 7");
  set_log_step(12);
  EXPECT_EQ(log_step(), 12U);
  log().info("hello");
  log().debug("hidden");
  const auto text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find("info [rank 7 step 12] hello"), std::string::npos) << text;
  EXPECT_EQ(text.find("hidden"), std::string::npos);
}

TEST(Log, AnUnknownLevelIsAnError) {
  setenv("ACCELMGR_LOG_LEVEL", "loud", 1);
  EXPECT_THROW(start_logging("host"), ConfigError);
  unsetenv("ACCELMGR_LOG_LEVEL");
}

}  // namespace
}  // namespace accelmgr::base
