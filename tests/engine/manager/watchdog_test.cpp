#include "engine/manager/watchdog.hpp"

#include <gtest/gtest.h>

#include "base/timing.hpp"
#include "engine/session/attempt.hpp"

namespace accelmgr::manager {
namespace {

using session::RankMask;

constexpr std::int64_t step_ns = timing::supervisor_look_ns;

std::int64_t ns(double seconds) { return static_cast<std::int64_t>(seconds * 1e9); }

const std::int64_t first_look_ns = ns(1000);

/// A session of two ready runners with an open attempt. The test sets the clock and what the kernel reports.
class WatchdogTest : public testing::Test {
 protected:
  WatchdogTest()
      : session_(session::Session::create({.ranks = 2, .bytes = {.parameters = 64}, .tensors = 1}, 2, 1)),
        watchdog_(config(), session_, [this](pid_t) { return usage_; }) {
    session_.control().team.store(3);
    for (int rank = 0; rank < 2; ++rank) session_.record(rank).state.store(session::RunnerState::ready);
    session::open_attempt(session_, {.participants = 3});
  }

  static const Config& config() {
    static const Config value = [] {
      Config c;
      c.abort_grace = 5;
      c.runners.hang_timeout = 10;
      c.runners.reduction_timeout = 3;
      return c;
    }();
    return value;
  }

  /// Lets the watchdog look in its usual intervals for `seconds`. Ends with the first verdicts.
  std::vector<Verdict> watch(
      double seconds, const std::function<void()>& meanwhile = [] {}) {
    for (const auto end = now_ns_ + ns(seconds); now_ns_ < end;) {
      now_ns_ += step_ns;
      meanwhile();
      if (auto verdicts = watchdog_.look(now_ns_); !verdicts.empty()) return verdicts;
    }
    return {};
  }
  /// Rank 1 alone is found, for that reason.
  static void expect_found(const std::vector<Verdict>& verdicts, const std::string& reason) {
    ASSERT_EQ(verdicts.size(), 1u);
    EXPECT_EQ(verdicts[0].rank, 1);
    EXPECT_NE(verdicts[0].why.find(reason), std::string::npos) << verdicts[0].why;
  }
  void expect_watched_for(double seconds) const {
    EXPECT_GE(now_ns_, first_look_ns + ns(seconds));
    EXPECT_LE(now_ns_, first_look_ns + ns(seconds) + 2 * step_ns);
  }
  void beat(int rank) { session_.record(rank).heartbeat.fetch_add(1); }

  session::Session session_;
  std::optional<ipc::ProcessUsage> usage_ =
      ipc::ProcessUsage{.peak_rss_bytes = 0, .rss_bytes = 0, .cpu_ns = 0, .state = 'S'};
  std::int64_t now_ns_ = first_look_ns;
  Watchdog watchdog_;
};

TEST_F(WatchdogTest, WhoMakesProgressIsLeftAlone) {
  EXPECT_TRUE(watch(100, [this] {
                beat(0);
                beat(1);
              }).empty());
}

TEST_F(WatchdogTest, WhoIsSilentAndUsesNoProcessorHangs) {
  expect_found(watch(100, [this] { beat(0); }), "runner 1 hangs");
  expect_watched_for(10);
}

TEST_F(WatchdogTest, SaysForHowLongARunnerHasBeenSilent) {
  EXPECT_EQ(watchdog_.silent_ns(0), 0) << "it has not looked yet";
  watch(4, [this] { beat(0); });
  EXPECT_EQ(watchdog_.silent_ns(0), 0);
  EXPECT_EQ(watchdog_.silent_ns(1), ns(4) - step_ns);
  for (int rank = 0; rank < 2; ++rank)
    session_.record(rank).acknowledged_attempt.store(session_.word().attempt);
  watch(1);
  EXPECT_EQ(watchdog_.silent_ns(1), 0) << "it has nothing to do";
}

TEST_F(WatchdogTest, WhoWasStoppedIsCalledStopped) {
  usage_->state = 'T';
  expect_found(watch(100, [this] { beat(0); }), "is stopped");
}

TEST_F(WatchdogTest, WhoIsSilentButComputesIsSlowAndGoesOn) {
  usage_->state = 'R';
  EXPECT_TRUE(watch(100, [this] {
                beat(0);
                usage_->cpu_ns += step_ns / 2;
              }).empty());
}

TEST_F(WatchdogTest, WhoWaitsForAProcessorDoesNotHang) {
  usage_->state = 'R';
  EXPECT_TRUE(watch(100, [this] { beat(0); }).empty());
  usage_->state = 'S';
  EXPECT_TRUE(watch(4, [this] { beat(0); }).empty());
  EXPECT_EQ(watch(2, [this] { beat(0); }).size(), 1u);
}

TEST_F(WatchdogTest, WhoComputesIsNotTakenForOneThatHangsBecauseOfALateLook) {
  auto hasty = config();
  hasty.runners.hang_timeout = 0.5;
  Watchdog watchdog(hasty, session_, [this](pid_t) { return usage_; });
  const auto look_at = [&](double seconds) { return watchdog.look(ns(2000 + seconds)); };
  for (const double at : {0.0, 0.05, 0.1, 0.15, 0.2, 0.49}) EXPECT_TRUE(look_at(at).empty()) << at;
  usage_->cpu_ns += step_ns / 5;
  EXPECT_TRUE(look_at(0.54).empty());
}

TEST_F(WatchdogTest, ItsOwnGapIsNotTheirs) {
  watch(8);
  now_ns_ += ns(3600);  // The supervisor was suspended, perhaps with the runners.
  EXPECT_TRUE(watch(1).empty());
  EXPECT_EQ(watch(3).size(), 2u);
}

TEST_F(WatchdogTest, BetweenStepsNobodyHangs) {
  session::abort_attempt(session_, 1, session::author_host);
  session::close_if_over(session_, 1);
  for (int rank = 0; rank < 2; ++rank) session_.record(rank).acknowledged_attempt.store(1);
  EXPECT_TRUE(watch(100).empty());
}

TEST_F(WatchdogTest, WhoDoesNotLeaveAnAbortedStepIsTold) {
  session::abort_attempt(session_, 1, session::author_host);
  session::close_if_over(session_, 1);
  session_.record(0).acknowledged_attempt.store(1);
  expect_found(watch(100, [this] { beat(1); }), "abort_grace");  // Its heartbeat does not help it.
  expect_watched_for(5);
}

TEST_F(WatchdogTest, ACommittedReductionHasTheTimeOfItsOwnSetting) {
  for (int rank = 0; rank < 2; ++rank) session::cast_vote({session_, rank}, 1);
  ASSERT_TRUE(session_.word().committed(3));
  EXPECT_EQ(watch(100).size(), 2u);
  expect_watched_for(3);
}

TEST_F(WatchdogTest, WhoWaitsForAProcessorInACommittedReductionHasMoreTime) {
  for (int rank = 0; rank < 2; ++rank) session::cast_vote({session_, rank}, 1);
  usage_->state = 'R';
  EXPECT_TRUE(watch(4.9).empty());
  EXPECT_EQ(watch(0.3).size(), 2u);
}

TEST_F(WatchdogTest, WhoComputesInACommittedReductionWithoutProgressHangs) {
  for (int rank = 0; rank < 2; ++rank) session::cast_vote({session_, rank}, 1);
  usage_->state = 'R';
  EXPECT_EQ(watch(100, [this] { usage_->cpu_ns += step_ns / 2; }).size(), 2u);
}

/// The mean gradient of the attempt is whole, and runners apply it: nothing but their acknowledgement
/// follows.
class WatchdogOfUpdates : public WatchdogTest {
 protected:
  WatchdogOfUpdates() {
    session_.control().request.applies = session::Applies::replicas;
    for (int rank = 0; rank < 2; ++rank) {
      session::cast_vote({session_, rank}, 1);
      session_.record(rank).cursor.store(session::encode({.attempt = 1, .chunk = session::cursor_finished}));
    }
    session::close_if_over(session_, 1);
    EXPECT_TRUE(session_.word().closed);
    session_.record(0).acknowledged_attempt.store(1);
  }
};

TEST_F(WatchdogOfUpdates, MayTakeLongerThanAnAbort) {
  usage_->state = 'R';
  EXPECT_TRUE(watch(config().step_timeout - 1, [this] { usage_->cpu_ns += step_ns / 2; }).empty());
  expect_found(watch(2, [this] { usage_->cpu_ns += step_ns / 2; }), "the update of a committed step");
}

TEST_F(WatchdogOfUpdates, HangsLikeAnyComputation) { expect_found(watch(11), "runner 1 hangs"); }

TEST_F(WatchdogTest, AReplacementBeginsWithFullPatience) {
  watch(9);
  for (int rank = 0; rank < 2; ++rank) session_.record(rank).generation.fetch_add(1);
  EXPECT_TRUE(watch(9).empty());
}

TEST_F(WatchdogTest, WhoIsNotOfTheTeamIsNotWatched) {
  session_.control().team.store(1);
  EXPECT_TRUE(watch(100, [this] { beat(0); }).empty());
}

}  // namespace
}  // namespace accelmgr::manager
