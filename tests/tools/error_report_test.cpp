// Tests of the error report: a failure is reported once, first cause first, as text and as JSON. An error
// while reporting is only a warning.
#include "error_report.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/unique_fd.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::program {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::UnorderedElementsAre;

Failure killed_runner() {
  return {.time_s = 1714564800.1234,
          .rank = 1,
          .pid = 4711,
          .signal = 9,
          .exit = "killed by signal 9 (KILL)",
          .phase = "backward",
          .log = {"12:00:00.001 info [rank 1 step 16] one", "12:00:00.100 warning [rank 1 step 17] two"},
          .step = 17,
          .attempt = 19};
}

Failure failed() {
  return {.time_s = 1714564801.9999,
          .rank = 0,
          .pid = 4712,
          .exit_code = 1,
          .exit = "exit code 1",
          .phase = "forward",
          .what = "shapes [2] and [3] differ",
          .step = 17,
          .attempt = 20};
}

StepResult lost(std::vector<Failure> causes) {
  StepResult result;
  result.status = StepStatus::runner_lost;
  result.step = 16;
  result.attempt = 20;
  result.error = "2 losses in 60 s, 1 is allowed";
  result.causes = std::move(causes);
  return result;
}

TEST(FailureText, HasAHeadlineAndALineForEachCauseFirstCauseFirst) {
  EXPECT_EQ(
      failure_text(lost({killed_runner(), failed()})),
      "step 17 failed: runner_lost: 2 losses in 60 s, 1 is allowed\n"
      "  2024-05-01T12:00:00.123Z rank 1, phase backward, step 17, pid 4711: killed by signal 9 (KILL)\n"
      "      12:00:00.001 info [rank 1 step 16] one\n"
      "      12:00:00.100 warning [rank 1 step 17] two\n"
      "  2024-05-01T12:00:02.000Z rank 0, phase forward, step 17, pid 4712: exit code 1: shapes [2] and "
      "[3] differ");
}

TEST(FailureText, DoesNotRepeatTheHeadline) {
  auto failure = lost({failed()});
  failure.error = "runner 0 failed in phase forward: shapes [2] and [3] differ";
  EXPECT_EQ(failure_text(failure),
            "step 17 failed: runner_lost: runner 0 failed in phase forward: shapes [2] and [3] differ\n"
            "  2024-05-01T12:00:02.000Z rank 0, phase forward, step 17, pid 4712: exit code 1");
}

TEST(FailureText, IsTheHeadlineWhereNobodyWasLost) {
  StepResult failure{.status = StepStatus::timeout};
  failure.error = "no result within 1 s: rank 0 in phase forward\n";
  EXPECT_EQ(failure_text(failure), "step 1 failed: timeout: no result within 1 s: rank 0 in phase forward");
  failure = lost({});
  failure.counted = true;
  EXPECT_THAT(failure_text(failure), testing::StartsWith("step 16 failed: "));
}

TEST(FailureText, SaysWhoIsNoRunnerAndLeavesOutWhatIsUnknown) {
  auto cause = failed();
  cause.rank = -1;
  cause.phase = "";
  cause.exit = "";
  EXPECT_THAT(failure_text(lost({cause})),
              HasSubstr("Z manager or fork server, step 17, pid 4712: shapes [2] and [3] differ"));
}

TEST(FailureText, IndentsTheLinesOfAnExceptionAndReplacesTornUtf8) {
  auto cause = failed();
  cause.what = "first\nsecond \xE2\x82";
  cause.log = {"a log line\nof two"};
  EXPECT_THAT(failure_text(lost({cause})),
              testing::EndsWith("exit code 1: first\n    second \uFFFD\n      a log line\n      of two"));
}

TEST(FailureText, LeavesOutTheLinesOfTheLogThatSayWhatTheExceptionDoes) {
  auto cause = failed();
  cause.what += "\n  File \"model.py\", line 3";
  cause.log = {"12:00:00.001 info [rank 0 step 17] one",
               "12:00:00.002 info [rank 0 step 17] shapes [2] and [3] differ", "  File \"model.py\", line 3"};
  const auto text = failure_text(lost({cause}));
  EXPECT_THAT(text, HasSubstr("[rank 0 step 17] one"));
  EXPECT_EQ(text.find("shapes [2]"), text.rfind("shapes [2]")) << text;
  EXPECT_EQ(text.find("model.py"), text.rfind("model.py")) << text;
}

TEST(FailureText, SaysWhatToDoAboutARunnerThatASignalEnded) {
  EXPECT_THAT(failure_text(lost({killed_runner()})), testing::EndsWith("smaller model need less"));
  auto crashed = killed_runner();
  crashed.signal = SIGSEGV;
  EXPECT_THAT(failure_text(lost({crashed})), HasSubstr("\n  it crashed in native code"));
  auto ended = killed_runner();
  ended.what = "runner 1 hangs: 60.0 s in phase forward";
  EXPECT_THAT(failure_text(lost({ended})), Not(HasSubstr("dmesg"))) << "it was we who sent the signal";
}

TEST(ErrorJson, HoldsTheFailureAndItsCausesFirstCauseFirst) {
  const auto report = json::parse(error_json(lost({killed_runner(), failed()}), 1714564805.5));
  const json expected{
      {"accelmgr", "error report"},
      {"status", "runner_lost"},
      {"step", 17},
      {"attempt", 20},
      {"error", "2 losses in 60 s, 1 is allowed"},
      {"time", "2024-05-01T12:00:05.500Z"},
      {"causes",
       {{{"time", "2024-05-01T12:00:00.123Z"},
         {"rank", 1},
         {"pid", 4711},
         {"phase", "backward"},
         {"step", 17},
         {"attempt", 19},
         {"exit", "killed by signal 9 (KILL)"},
         {"what", ""},
         {"log", {"12:00:00.001 info [rank 1 step 16] one", "12:00:00.100 warning [rank 1 step 17] two"}}},
        {{"time", "2024-05-01T12:00:02.000Z"},
         {"rank", 0},
         {"pid", 4712},
         {"phase", "forward"},
         {"step", 17},
         {"attempt", 20},
         {"exit", "exit code 1"},
         {"what", "shapes [2] and [3] differ"},
         {"log", json::array()}}}}};
  EXPECT_EQ(report, expected);
}

TEST(ErrorJson, IsJsonWhateverTheExceptionSays) {
  auto cause = failed();
  cause.what = "a \"quote\"\n\x01 torn \xE2\x82";
  cause.log = {"torn \xE2\x82"};
  const auto report = json::parse(error_json(lost({cause}), 0));
  EXPECT_EQ(report["causes"][0]["what"], "a \"quote\"\n\x01 torn \uFFFD");
  EXPECT_EQ(report["causes"][0]["log"][0], "torn \uFFFD");
  EXPECT_EQ(json::parse(error_json(lost({}), 0))["causes"], json::array());
}

class ErrorFile : public testing::Test {
 protected:
  /// What `call` prints on standard error.
  template <typename Call>
  static std::string said_by(Call&& call) {
    testing::internal::CaptureStderr();
    call();
    return testing::internal::GetCapturedStderr();
  }
  std::string content() const {
    std::ifstream file(folder_ / "accelmgr-error.json");
    return {std::istreambuf_iterator<char>(file), {}};
  }
  std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const auto& entry : fs::directory_iterator(folder_)) out.push_back(entry.path().filename());
    return out;
  }
  const test::TemporaryFolder temporary_;
  const fs::path folder_ = temporary_.path();
};

TEST_F(ErrorFile, IsWrittenWholeAndReplacesAnOlderOne) {
  write_error_report(folder_, lost({}));
  EXPECT_EQ(said_by([&] { write_error_report(folder_, lost({killed_runner()})); }), "");
  const auto report = json::parse(content());
  EXPECT_EQ(report["causes"][0]["pid"], 4711);
  EXPECT_THAT(report["time"].get<std::string>(),
              testing::MatchesRegex("20[0-9]{2}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-6][0-9]\\."
                                    "[0-9]{3}Z"));
  EXPECT_THAT(names(), UnorderedElementsAre("accelmgr-error.json"));
}

TEST_F(ErrorFile, IsNeverSeenInPart) {
  write_error_report(folder_, lost({killed_runner()}));
  const pid_t writer = fork();
  ASSERT_GE(writer, 0);
  if (writer == 0) {
    for (;;) write_error_report(folder_, lost({killed_runner(), failed()}));
  }
  for (int i = 0; i < 500; ++i) EXPECT_TRUE(json::accept(content())) << i;
  kill(writer, SIGKILL);
  ASSERT_EQ(waitpid(writer, nullptr, 0), writer);
  EXPECT_TRUE(json::accept(content()));
}

TEST_F(ErrorFile, ThatCannotBeMadeIsAWarning) {
  const auto missing = folder_ / "missing";
  EXPECT_THAT(said_by([&] { write_error_report(missing, lost({killed_runner()})); }),
              AllOf(testing::StartsWith("accelmgr: warning: opening " + missing.string()),
                    HasSubstr("No such file or directory")));
  fs::create_directory(folder_ / "accelmgr-error.json");
  EXPECT_EQ(said_by([&] { remove_error_report(folder_); }), "");
  EXPECT_THAT(said_by([&] { write_error_report(folder_, lost({killed_runner()})); }),
              AllOf(testing::StartsWith("accelmgr: warning: " + folder_.string()),
                    HasSubstr("is not a report of accelmgr and is left as it is")));
  EXPECT_THAT(names(), UnorderedElementsAre("accelmgr-error.json"));
}

TEST_F(ErrorFile, ForWhichThereIsNoRoomIsAWarningAndLeavesTheOlderOne) {
  write_error_report(folder_, lost({}));
  const auto older = content();
  auto cause = killed_runner();
  cause.log.assign(1000, "a line of the log, and there are many of them");
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{.rlim_cur = 16384, .rlim_max = before.rlim_max};  // Still enough for the warning.
  auto* action = signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const auto said = said_by([&] { write_error_report(folder_, lost({cause})); });
  setrlimit(RLIMIT_FSIZE, &before);
  signal(SIGXFSZ, action);
  EXPECT_THAT(said, AllOf(testing::StartsWith("accelmgr: warning: writing "), HasSubstr("File too large")));
  EXPECT_EQ(content(), older);
  EXPECT_THAT(names(), UnorderedElementsAre("accelmgr-error.json"));
}

TEST_F(ErrorFile, OfAnEarlierRunIsRemovedAndNothingElse) {
  write_error_report(folder_, lost({killed_runner()}));
  for (const auto* name : {"error.json", "error.json.tmp", "accelmgr-error.json.tmp", "run.jsonl"})
    temporary_.write(name, "earlier");
  EXPECT_EQ(said_by([&] { remove_error_report(folder_); }), "");
  EXPECT_THAT(names(),
              UnorderedElementsAre("error.json", "error.json.tmp", "accelmgr-error.json.tmp", "run.jsonl"));
  EXPECT_EQ(said_by([&] { remove_error_report(folder_); }), "") << "there is none";
  EXPECT_EQ(said_by([&] { remove_error_report(folder_ / "missing"); }), "");
}

/// Writes a report in a child that the kernel kills at the 101st byte.
void write_and_be_killed(const fs::path& folder) {
  const pid_t writer = fork();
  ASSERT_GE(writer, 0);
  if (writer == 0) {
    const rlimit small{.rlim_cur = 100, .rlim_max = 100};
    const rlimit no_core{};
    setrlimit(RLIMIT_CORE, &no_core);
    setrlimit(RLIMIT_FSIZE, &small);
    write_error_report(folder, lost({killed_runner()}));
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(writer, &status, 0), writer);
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGXFSZ) << status;
}

TEST_F(ErrorFile, OfAKilledWriterGoesWithTheNextReportAndWhenARunStarts) {
  write_and_be_killed(folder_);
  EXPECT_THAT(names(), ElementsAre(testing::StartsWith("accelmgr-error.json.")));
  EXPECT_EQ(said_by([&] { write_error_report(folder_, lost({killed_runner()})); }), "");
  EXPECT_THAT(names(), ElementsAre("accelmgr-error.json"));
  write_and_be_killed(folder_);
  EXPECT_EQ(said_by([&] { remove_error_report(folder_); }), "");
  EXPECT_THAT(names(), IsEmpty());
}

TEST_F(ErrorFile, ThatAnotherProcessWritesIsNotRemoved) {
  write_and_be_killed(folder_);
  const auto left = names();
  ASSERT_EQ(left.size(), 1U);
  const base::UniqueFd writer(open((folder_ / left.front()).c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_EQ(flock(writer.get(), LOCK_EX), 0);
  remove_error_report(folder_);
  EXPECT_EQ(names(), left);
}

TEST_F(ErrorFile, OfSomebodyElseStays) {
  for (const auto* text : {"", "{}", "{\n  \"accelmgr\": \"error rep", "{\"status\": \"failed\"}"}) {
    temporary_.write("accelmgr-error.json", text);
    EXPECT_EQ(said_by([&] { remove_error_report(folder_); }), "");
    EXPECT_THAT(
        said_by([&] { write_error_report(folder_, lost({killed_runner()})); }),
        HasSubstr(
            "is not a report of accelmgr and is left as it is; the failure is reported on standard error"));
    EXPECT_EQ(content(), text);
    EXPECT_THAT(names(), UnorderedElementsAre("accelmgr-error.json"));
  }
}

TEST_F(ErrorFile, HasThePermissionsOfAnyFile) {
  const auto before = umask(027);
  write_error_report(folder_, lost({killed_runner()}));
  EXPECT_EQ(umask(before), 027U);
  EXPECT_EQ(static_cast<unsigned>(fs::status(folder_ / "accelmgr-error.json").permissions()), 0640U);
}

}  // namespace
}  // namespace accelmgr::program
