// Checks that run_world() reports what fails on a rank, whether the rank is a thread, a forked process or an
// executed one.
#include "world.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <stdexcept>

namespace accelmgr::collective::contract {
namespace {

bool says(const std::vector<std::string>& failures, const std::string& text) {
  for (const auto& failure : failures)
    if (failure.find(text) != std::string::npos) return true;
  return false;
}

void fails_on_one(Rank& self) {
  EXPECT_NE(self.world.rank(), 1) << "as it should\nin two lines";
  self.meeting.meet(self.world.size());
}

void throws_on_two(Rank& self) {
  EXPECT_TRUE(self.world.rank() != 2) << "an assertion";
  if (self.world.rank() == 2) throw std::runtime_error("an exception");
}

void dies_on_one(Rank& self) {
  self.meeting.meet(self.world.size());
  if (self.world.rank() == 1) self.meeting.die(1);
}

void ends_on_one(Rank& self) {
  if (self.world.rank() == 1) _exit(5);
}

void is_killed_on_one(Rank& self) {
  if (self.world.rank() == 1) kill(getpid(), SIGKILL);
}

// A promise that executed ranks find by its name. It needs more ranks than any backend has, so no test runs
// it by itself.
constexpr int nowhere = most_ranks;
Promise promise(const char* name, Body body) {
  return {"Failing", name, body, {nowhere}, __FILE__, __LINE__};
}
const Registered registered[] = {
    Registered(promise("FailsOnOne", fails_on_one)), Registered(promise("ThrowsOnTwo", throws_on_two)),
    Registered(promise("DiesOnOne", dies_on_one)), Registered(promise("EndsOnOne", ends_on_one)),
    Registered(promise("IsKilledOnOne", is_killed_on_one))};

std::vector<std::string> failures_of(Start start, const char* name) {
  return run_world(find_backend("shm"), start, 3, find_promise(std::string("Failing.") + name));
}

class AnyRank : public testing::TestWithParam<Start> {};
class AnyProcess : public testing::TestWithParam<Start> {};

TEST_P(AnyRank, ReportsAFailedAssertionWithItsRankAndText) {
  const auto failures = failures_of(GetParam(), "FailsOnOne");
  ASSERT_EQ(failures.size(), 1U);
  EXPECT_TRUE(says(failures, "rank 1: ")) << failures[0];
  EXPECT_TRUE(says(failures, "world_test.cpp:")) << failures[0];
  EXPECT_TRUE(says(failures, "as it should\nin two lines")) << failures[0];
}

TEST_P(AnyRank, ReportsAnExceptionBesideWhatFailedBefore) {
  const auto failures = failures_of(GetParam(), "ThrowsOnTwo");
  ASSERT_EQ(failures.size(), 2U);
  EXPECT_TRUE(says(failures, "rank 2: exception: an exception"));
  EXPECT_TRUE(says(failures, "an assertion"));
}

TEST_P(AnyProcess, MayDieWhenItSaysSo) { EXPECT_TRUE(failures_of(GetParam(), "DiesOnOne").empty()); }

TEST_P(AnyProcess, ReportsAnEndThatNobodyExpected) {
  EXPECT_EQ(failures_of(GetParam(), "EndsOnOne"), std::vector<std::string>{"rank 1: exit code 5"});
  EXPECT_EQ(failures_of(GetParam(), "IsKilledOnOne"),
            std::vector<std::string>{"rank 1: killed by signal 9 (KILL)"});
}

const auto start_name = [](const auto& info) { return name_of(info.param); };
INSTANTIATE_TEST_SUITE_P(Start, AnyRank, testing::Values(Start::threads, Start::forked, Start::executed),
                         start_name);
INSTANTIATE_TEST_SUITE_P(Start, AnyProcess, testing::Values(Start::forked, Start::executed), start_name);

}  // namespace
}  // namespace accelmgr::collective::contract
