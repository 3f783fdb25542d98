#include "launcher/agent/failure_summary.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace accelmgr::agent {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

Failure exited() {
  return {.time_s = 1.5,
          .rank = 3,
          .pid = 77,
          .exit_code = 4,
          .exit = "exit code 4",
          .log = {"before", "the last line"},
          .local_rank = 1,
          .node_rank = 1,
          .hostname = "beta",
          .log_folder = "/logs/attempt_0/3"};
}

Failure killed() {
  return {.time_s = 2,
          .rank = 0,
          .pid = 78,
          .signal = 9,
          .exit = "killed by signal 9 (KILL)",
          .local_rank = 0,
          .node_rank = 0,
          .hostname = "alpha"};
}

TEST(Failure, TheExitCodeIsThatOfTheProgramOr128AndTheSignal) {
  EXPECT_EQ(exit_code_of(exited()), 4);
  EXPECT_EQ(exit_code_of(killed()), 137);
  EXPECT_EQ(exit_code_of(Failure{}), 1);
}

TEST(Failure, GoesThroughJsonUnchanged) {
  auto failure = exited();
  failure.what = "RuntimeError: x";
  failure.trace = "Traceback";
  EXPECT_EQ(failure_from(nlohmann::json::parse(to_json(failure).dump())), failure);
  EXPECT_EQ(failure_from(to_json(killed())), killed());
}

TEST(ErrorRecord, AsTorchsRecordWritesIt) {
  Failure failure;
  take_error_file(
      R"({"message": {"message": "ValueError: bad", "extraInfo": {"py_callstack": "Traceback: line 3", "timestamp": "1"}}})",
      failure);
  EXPECT_EQ(failure.what, "ValueError: bad");
  EXPECT_EQ(failure.trace, "Traceback: line 3");
}

TEST(ErrorRecord, AMessageAloneOrAnyTextIsTakenAsItIs) {
  Failure failure;
  take_error_file(R"({"message": "bad"})", failure);
  EXPECT_EQ(failure.what, "bad");
  take_error_file("no JSON at all", failure);
  EXPECT_EQ(failure.what, "no JSON at all");
}

TEST(ErrorRecord, AnEmptyOneSaysNothing) {
  Failure failure;
  take_error_file("", failure);
  take_error_file(" \n", failure);
  EXPECT_EQ(failure, Failure{});
}

TEST(ErrorRecord, AHugeMessageIsCut) {
  Failure failure;
  take_error_file(std::string(1 << 20, 'x'), failure);
  EXPECT_LT(failure.what.size(), 8192U);
}

TEST(FailureSummary, SaysWhoWhenHowAndTheEndOfItsStandardError) {
  const auto text = summary_text(
      {.first = exited(), .later = {killed()}, .ended = 2, .report = "/here/accelmgr-error.json"});
  EXPECT_THAT(text, AllOf(HasSubstr("rank 3 failed: exit code 4"), HasSubstr("1970-01-01T00:00:01.500Z"),
                          HasSubstr("local rank 1 of node 1, beta, pid 77"), HasSubstr("the last line"),
                          HasSubstr("/logs/attempt_0/3"), HasSubstr("/here/accelmgr-error.json")));
  EXPECT_THAT(text, AllOf(HasSubstr("later failures:"), HasSubstr("killed by signal 9 (KILL)"),
                          HasSubstr("2 processes ended because of it")));
  EXPECT_THAT(text, Not(HasSubstr("restarts")));
}

TEST(FailureSummary, TheErrorFileReplacesTheEndOfStandardError) {
  auto failure = exited();
  failure.what = "ValueError: bad";
  failure.trace = "first\nsecond";
  const auto text = summary_text({.first = failure, .later = {}});
  EXPECT_THAT(text, AllOf(HasSubstr("ValueError: bad"), HasSubstr("      first\n      second"),
                          Not(HasSubstr("the last line"))));
}

TEST(FailureSummary, SaysHowOftenAllWereStartedAgain) {
  EXPECT_THAT(summary_text({.first = killed(), .later = {}, .attempt = 2, .max_restarts = 2}),
              HasSubstr("after 2 of at most 2 restarts"));
}

TEST(FailureSummary, TheReportHasTheSameForPrograms) {
  const auto report =
      nlohmann::json::parse(summary_json({.first = exited(), .later = {killed()}, .ended = 2, .attempt = 1}));
  EXPECT_EQ(report["status"], "failed");
  EXPECT_EQ(report["exit_code"], 4);
  EXPECT_EQ(report["attempt"], 1);
  EXPECT_EQ(report["ended"], 2);
  EXPECT_EQ(report["first"]["rank"], 3);
  EXPECT_EQ(report["first"]["hostname"], "beta");
  EXPECT_EQ(report["first"]["time"], "1970-01-01T00:00:01.500Z");
  EXPECT_EQ(report["later"][0]["signal"], 9);
}

TEST(FailureSummary, WhatIsNoUtf8DoesNotKeepTheReportFromBeingWritten) {
  auto failure = exited();
  failure.log = {"\xff\xfe"};
  EXPECT_FALSE(summary_json({.first = failure, .later = {}}).empty());
}

}  // namespace
}  // namespace accelmgr::agent
