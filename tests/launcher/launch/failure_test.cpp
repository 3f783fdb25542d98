// Tests of the ways in which ranks fail, and of what SpawnError then says.
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>

#include "accelmgr/errors.hpp"
#include "functions.hpp"
#include "launched.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::launch::test {
namespace {

class Failing : public Launched, public testing::WithParamInterface<StartMethod> {
 protected:
  static SpawnError obeyed(const Value& orders) {
    return failure_of([&] { spawn("obey", orders, options(static_cast<int>(orders.size()), GetParam())); });
  }
};

TEST_P(Failing, AnExceptionIsToldWithRankTypeTextAndTrace) {
  const auto error = obeyed({"hang", "throw", "hang"});
  EXPECT_EQ(error.rank(), 1);
  EXPECT_EQ(error.exit_code(), 17);
  EXPECT_EQ(error.signal(), 0);
  EXPECT_EQ(error.first().type, "std::runtime_error");
  EXPECT_EQ(error.first().what, "as ordered");
  EXPECT_EQ(error.first().phase, "function");
  EXPECT_GT(error.first().time_s, 1.6e9);
  EXPECT_TRUE(error.later().empty()) << "who was ended because of it has not failed";
  EXPECT_TRUE(says(error.what(), {"rank 1", "std::runtime_error", "as ordered", "exit code 17"}));
}

TEST_P(Failing, NestedExceptionsAreTheTraceOutermostFirstUpToABound) {
  EXPECT_TRUE(
      says(obeyed({"hang", "throw nested 2"}).trace(),
           {"#0 std::_Nested_exception<std::runtime_error>: level 2", "#2 std::out_of_range: the cause"}));
  const auto trace = obeyed({"hang", "throw nested 100"}).trace();
  EXPECT_NE(trace.find("#15 "), std::string::npos);
  EXPECT_EQ(trace.find("#17 "), std::string::npos);
}

TEST_P(Failing, WhatSaysNothingIsToldByItsType) {
  EXPECT_TRUE(
      says(obeyed({"throw nothing", "hang"}).what(), {"rank 0 failed: std::runtime_error: (no message)"}));
  const auto error = obeyed({"throw int", "hang"});
  EXPECT_EQ(error.first().type, "int");
  EXPECT_TRUE(says(error.what(), {"rank 0 failed: int: (no message)"}));
}

TEST_P(Failing, TheFramesOfAnErrorOfTorchAreLeftOut) {
  const auto error = obeyed({"throw torch", "hang"});
  EXPECT_EQ(error.first().what, "shapes differ");
  EXPECT_EQ(error.first().trace, "#0 std::runtime_error: shapes differ\n");
}

TEST_P(Failing, AnExitCodeIsTold) {
  const auto error = obeyed({"hang", "return", "exit 3"});
  EXPECT_EQ(error.rank(), 2);
  EXPECT_EQ(error.exit_code(), 3);
}

TEST_P(Failing, ASignalIsToldByItsName) {
  const auto error = obeyed({"kill 9", "hang"});
  EXPECT_EQ(error.rank(), 0);
  EXPECT_EQ(error.signal(), SIGKILL);
  EXPECT_EQ(error.exit_code(), 0);
  EXPECT_TRUE(says(error.what(), {"signal 9", "KILL"}));
}

TEST_P(Failing, ASetupThatFailsIsToldAsOne) {
  auto chosen = options(2, GetParam());
  chosen.setup_name = "obey";
  const auto error = failure_of([&] { spawn("tell", {"throw", "hang"}, chosen); });
  EXPECT_EQ(error.rank(), 0);
  EXPECT_EQ(error.first().phase, "setup");
  EXPECT_TRUE(says(error.what(), {"setup"}));
}

INSTANTIATE_TEST_SUITE_P(StartMethods, Failing, every_method, method_name);

class Failures : public Launched {};

/// Waits until the process has ended. It may have been reaped already.
void wait_gone(pid_t pid) {
  const auto deadline = soon();
  while (kill(pid, 0) == 0 && !deadline.passed()) sched_yield();
}

TEST_F(Failures, WhatHappenedBeforeAnybodyJoinedIsToldInTheOrderOfTime) {
  std::vector<Line> lines(4);
  auto context = spawn(
      [&](int rank, const Value&) -> Value {
        lines[static_cast<std::size_t>(rank)].await_order();
        if (rank == 0) throw std::runtime_error("of rank 0");
        if (rank == 3) raise(SIGKILL);
        if (rank == 1) ipc::test::hang();
        _exit(5);
      },
      {}, not_joined(options(4)));
  const auto pids = context.pids();
  for (const int rank : {2, 0, 3}) {
    lines[static_cast<std::size_t>(rank)].order();
    wait_gone(pids[static_cast<std::size_t>(rank)]);
  }
  const auto error = failure_of([&] { context.join(); });
  EXPECT_EQ(error.rank(), 2);
  EXPECT_EQ(error.exit_code(), 5);
  ASSERT_EQ(error.later().size(), 2U) << "rank 1 was ended, it has not failed";
  EXPECT_EQ(error.later()[0].rank, 0);
  EXPECT_EQ(error.later()[0].what, "of rank 0");
  EXPECT_EQ(error.later()[1].rank, 3);
  EXPECT_EQ(error.later()[1].signal, SIGKILL);
  EXPECT_TRUE(says(error.what(), {"rank 2", "rank 0", "of rank 0", "rank 3"}));
  EXPECT_EQ(failure_of([&] { context.join(); }).what(), std::string(error.what())) << "joined again";
}

TEST_F(Failures, TheExceptionIsPrintedWithItsDeviceAndWrittenToTheErrorFile) {
  const accelmgr::test::TemporaryFolder folder;
  const auto path = folder / "error.json";
  auto chosen = options(2);
  chosen.environment = {{"TORCHELASTIC_ERROR_FILE", path.string()}};
  testing::internal::CaptureStderr();
  failure_of([&] { spawn("obey", {"throw", "hang"}, chosen); });
  EXPECT_TRUE(says(testing::internal::GetCapturedStderr(),
                   {"Exception in device=CPU:0: as ordered\n#0 std::runtime_error: as ordered\n"}));
  std::ifstream file(path);
  const auto record = Value::parse(file, nullptr, false);
  ASSERT_TRUE(record.is_object());
  EXPECT_EQ(record.at("message").at("message"), "std::runtime_error: as ordered");
  EXPECT_EQ(record.at("message").at("extraInfo").at("py_callstack"), "#0 std::runtime_error: as ordered\n");
  EXPECT_GT(std::stoll(record.at("message").at("extraInfo").at("timestamp").get<std::string>()),
            1'600'000'000);
}

}  // namespace
}  // namespace accelmgr::launch::test
