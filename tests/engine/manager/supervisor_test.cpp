// Tests of starting, watching and replacing runners (supervisor.cpp, failure_recovery.cpp).
#include <gmock/gmock.h>
#include <signal.h>

#include <cerrno>

#include "engine/session/attempt.hpp"
#include "message_of.hpp"
#include "supervised.hpp"

namespace accelmgr::manager::test {
namespace {

using accelmgr::test::message_of;
using session::RunnerState;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

class SupervisorTest : public Supervised {};

// ---- Starts ----

TEST_F(SupervisorTest, StartsOneRunnerAfterTheOther) {
  make();
  EXPECT_EQ(server().take_request(), 0);
  run();
  EXPECT_EQ(server().take_request(), std::nullopt) << "runner 0 is not ready";
  server().fork(0);
  run();
  EXPECT_EQ(server().take_request(), std::nullopt) << "runner 0 was forked, but is not ready";
  say(0, "ready");
  EXPECT_EQ(state(0), RunnerState::ready);
  EXPECT_FALSE(ready_);
  expect_start(1);
  EXPECT_TRUE(ready_ && supervisor_->has_started());
  EXPECT_EQ(supervisor_->started().runners.size(), 2u);
}

TEST_F(SupervisorTest, AForkServerThatEndsFailsTheStart) {
  make();
  server().die();
  EXPECT_THAT(message_of<RunnerError>([&] { run(); }), HasSubstr("while it started the runners"));
}

TEST_F(SupervisorTest, AReplacementThatIsNotReadyInTimeIsEndedAndTriedAgain) {
  start_team();
  end(1);
  ASSERT_THAT(fork_all(), ElementsAre(1));
  after(61);
  EXPECT_EQ(incidents(), 1u) << "it was killed, but has not ended";
  end(1);
  EXPECT_EQ(incidents(), 2u);
  EXPECT_THAT(last_loss(), HasSubstr("not ready within start_timeout (60 s)"));
  after(config_.runners.restart_backoff);
  expect_start(1);
  EXPECT_EQ(state(1), RunnerState::ready);
}

TEST_F(SupervisorTest, ARunnerThatSaysWhatNoRunnerSaysIsLostAndTheOthersGoOn) {
  start_team();
  const std::string too_much(ipc::max_packet_bytes + 1, 'x');
  const std::pair<std::string, std::string> cases[] = {
      {"hello", "it said 'hello' (5 bytes)"}, {"", "has no bytes"}, {too_much, "is larger than"}};
  for (const auto& [said, why] : cases) {
    for (const bool is_known : {true, false}) {
      const auto before = incidents();
      end(1);
      after(config_.runners.restart_backoff * 100);
      ASSERT_EQ(server().take_request(), 1);
      if (is_known) server().fork(1);
      say(1, said);
      if (!is_known) server().fork(1);
      run();
      EXPECT_EQ(state(1), RunnerState::starting) << "it was killed, but has not ended";
      end(1);
      EXPECT_EQ(incidents(), before + 2);
      EXPECT_THAT(last_loss(), HasSubstr("runner 1 is not understood"));
      EXPECT_THAT(last_loss(), HasSubstr(why));
      after(config_.runners.restart_backoff * 100);
      expect_start(1);
      EXPECT_EQ(state(1), RunnerState::ready);
    }
  }
  EXPECT_EQ(state(0), RunnerState::ready);
}

// ---- Starts with a GPU for each rank ----

class DeviceStartTest : public Supervised {
 protected:
  DeviceStartTest() : Supervised(3) { config_.runners.device = Device::cuda; }
  /// All have opened their devices, and rank 0 builds.
  void open_all() {
    make();
    ASSERT_THAT(fork_all(), ElementsAre(0, 1, 2));
    for (const int rank : {2, 1, 0}) say(rank, "opened");
    ASSERT_TRUE(server().may_build(0));
  }
  void build(int rank) {
    say(rank, "built");
    say(rank, "ready");
  }
  /// The replacements of two runners that are lost at once open their devices.
  void replace(int rank, int other) {
    server().end(rank, SIGKILL);
    end(other);
    after(config_.runners.restart_backoff);
    EXPECT_THAT(fork_all(), ElementsAre(rank, other));
  }
  void start_devices() {
    open_all();
    for (int rank = 0; rank < 3; ++rank) {
      build(rank);
    }
    ASSERT_TRUE(ready_);
    for (int rank = 0; rank < 3; ++rank) server().may_build(rank);
  }
  /// What is said of a replacement, of rank 2.
  std::string end_of_one_that_opens_for_25_s_waits_for_30_and_builds_for(double seconds) {
    start_devices();
    replace(0, 2);
    say(0, "opened");
    EXPECT_TRUE(server().may_build(0));
    after(25);
    say(2, "opened");
    after(30);
    build(0);
    EXPECT_TRUE(server().may_build(2));
    after(seconds);
    end(2);
    return last_loss();
  }
};

TEST_F(DeviceStartTest, DevicesAreOpenedAtOnceAndReplicasBuiltOneAfterTheOtherInTheOrderOfRanks) {
  make();
  EXPECT_THAT(fork_all(), ElementsAre(0, 1, 2));
  say(2, "opened");
  say(1, "opened");
  EXPECT_FALSE(server().may_build(1) || server().may_build(2)) << "rank 0 is the first to build";
  say(0, "opened");
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_TRUE(server().may_build(rank));
    for (int other = rank + 1; other < 3; ++other) EXPECT_FALSE(server().may_build(other));
    EXPECT_EQ(state(rank), RunnerState::starting);
    say(rank, "built");
  }
  EXPECT_FALSE(ready_);
  for (const int rank : {1, 2, 0}) {
    EXPECT_FALSE(ready_);
    say(rank, "ready");
    EXPECT_EQ(state(rank), RunnerState::ready);
  }
  EXPECT_TRUE(ready_ && supervisor_->has_started());
  EXPECT_EQ(supervisor_->started().runners.size(), 3u);
}

TEST_F(DeviceStartTest, ARankOnTheCpuIsForkedWhenItsTurnHasCome) {
  config_.runners.devices = {"GPU-a", "cpu", "GPU-b"};
  make();
  EXPECT_THAT(fork_all(), ElementsAre(0, 2));
  say(2, "opened");
  say(0, "opened");
  EXPECT_TRUE(server().may_build(0));
  EXPECT_EQ(server().take_request(), std::nullopt);
  say(0, "built");
  EXPECT_THAT(fork_all(), ElementsAre(1));
  EXPECT_FALSE(server().may_build(2));
  say(1, "ready");
  EXPECT_TRUE(server().may_build(2));
}

TEST_F(DeviceStartTest, ARunnerThatEndsFailsTheStartAndThePartOfItsStartIsNamed) {
  const auto error_of = [this](int rank) {
    server().end(rank, SIGKILL);
    const auto message = message_of<RunnerError>([&] { run(); });
    server().end_all();
    return message;
  };
  make();
  fork_all();
  EXPECT_THAT(error_of(1),
              HasSubstr("runner 1 killed by signal 9 (KILL) in phase init (opening its device)"));
  open_all();
  EXPECT_THAT(error_of(1), HasSubstr("runner 1 killed by signal 9 (KILL) in phase init (waiting to build)"));
  open_all();
  say(0, "built");
  EXPECT_THAT(error_of(0),
              HasSubstr("runner 0 killed by signal 9 (KILL) in phase init (its replica is built)"));
}

TEST_F(DeviceStartTest, TheRunnerThatTakesTheTimeIsTheOneThatWasNotReadyInTime) {
  make();
  fork_all();
  say(0, "opened");
  say(2, "opened");
  build(0);
  after(59.9);
  EXPECT_THAT(message_of<RunnerError>([&] { after(0.2); }),
              HasSubstr("runner 1 was not ready within start_timeout (60 s); it is in phase init (opening"));
  server().end_all();
  open_all();
  after(59.9);
  EXPECT_THAT(message_of<RunnerError>([&] { after(0.2); }),
              HasSubstr("runner 0 was not ready within start_timeout (60 s); it is in phase init"));
}

TEST_F(DeviceStartTest, AReplacementWaitsForNoneThatOpensItsDeviceAndOneThatDoesNotOpenItIsEnded) {
  start_devices();
  replace(0, 2);
  say(2, "opened");
  EXPECT_TRUE(server().may_build(2));
  build(2);
  EXPECT_EQ(state(2), RunnerState::ready);
  after(61);
  end(0);
  EXPECT_THAT(last_loss(), HasSubstr("runner 0 was not ready within start_timeout (60 s)"));
  after(timing::longest_backoff_s);
  EXPECT_THAT(fork_all(), ElementsAre(0));
  say(0, "opened");
  EXPECT_TRUE(server().may_build(0));
}

TEST_F(DeviceStartTest, TheWaitForTheTurnDoesNotCountAgainstStartTimeout) {
  EXPECT_EQ(end_of_one_that_opens_for_25_s_waits_for_30_and_builds_for(34), "");
}

TEST_F(DeviceStartTest, AllOtherPartsOfAStartCountTogetherAgainstStartTimeout) {
  EXPECT_THAT(end_of_one_that_opens_for_25_s_waits_for_30_and_builds_for(36),
              HasSubstr("runner 2 was not ready within start_timeout (60 s)"));
}

TEST_F(DeviceStartTest, TheTurnOfARunnerThatIsLostGoesToTheNext) {
  start_devices();
  replace(0, 1);
  say(0, "opened");
  say(1, "opened");
  ASSERT_TRUE(server().may_build(0));
  end(0);
  EXPECT_TRUE(server().may_build(1));
}

TEST_F(DeviceStartTest, ARunnerThatAResizeRemovesWhileItOpensItsDeviceGetsNoTurn) {
  start_devices();
  end(2);
  fork_all();
  supervisor_->resize(2);
  EXPECT_TRUE(ipc::is_closed(server().runners[2].lifeline.get()));
  end(2, 0);
  EXPECT_EQ(state(2), RunnerState::absent);
  EXPECT_EQ(incidents(), 1u);
  after(100);
  EXPECT_EQ(server().take_request(), std::nullopt);
}

// ---- Losses ----

TEST_F(SupervisorTest, ALostRunnerIsReplacedAtOnceAndTheNextOnesEverLater) {
  start_team();
  end(1);
  EXPECT_EQ(server().take_request(), 1);
  EXPECT_EQ(server().runners[1].generation, 2u);
  start_runner(1);
  for (const double backoff : {4.0, 8.0, 16.0, timing::longest_backoff_s, timing::longest_backoff_s}) {
    end(1);
    EXPECT_EQ(state(1), RunnerState::lost);
    after(backoff - 0.1);
    EXPECT_EQ(server().take_request(), std::nullopt) << backoff;
    after(0.1);
    EXPECT_EQ(server().take_request(), 1) << backoff;
    start_runner(1);
  }
  after(config_.runners.restart_window);
  end(1);
  EXPECT_EQ(server().take_request(), 1) << "earlier losses are out of the window";
  EXPECT_EQ(incidents(), 7u);
  EXPECT_EQ(replacements(), 7u);
}

TEST_F(SupervisorTest, AnIncidentSaysWhatTheRunnerSaidLast) {
  start_team();
  auto& record = small_.session.record(1);
  record.phase.store(session::Phase::forward);
  session::open_attempt(small_.session, {.participants = 3});
  const auto attempt = small_.session.word().attempt;
  record.attempt.store(attempt);
  session::refuse_attempt({small_.session, 1}, attempt, session::Reason::exception, "the model collapsed");
  end(1, W_EXITCODE(17, 0));
  const auto& incident = last_incident();
  EXPECT_EQ(incident.rank, 1);
  EXPECT_EQ(incident.pid, server().runners[1].pid);
  EXPECT_EQ(incident.generation, 1u);
  EXPECT_EQ(ipc::describe_exit(incident.exit_status), "exit code 17");
  EXPECT_EQ(incident.phase, session::Phase::forward);
  EXPECT_EQ(incident.reason, session::Reason::exception);
  EXPECT_EQ(incident.step, 1u);
  EXPECT_EQ(incident.attempt, attempt);
  EXPECT_EQ(session::text_of(incident.what), "the model collapsed");
}

TEST_F(SupervisorTest, AnOpenAttemptOfALostRunnerIsAborted) {
  start_team();
  const auto attempt = session::open_attempt(small_.session, {.participants = 3});
  end(0);
  EXPECT_EQ(small_.session.word().attempt, attempt);
  EXPECT_TRUE(small_.session.word().abort);
}

TEST_F(SupervisorTest, TheSliceOfARunnerThatIsLostInACommittedAttemptIsReducedForIt) {
  start_team();
  commit();
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_FALSE(small_.session.word().closed);
    end(rank);
  }
  EXPECT_TRUE(small_.session.word().closed);
  for (const float gradient : session::gradients_of(small_.session)) ASSERT_EQ(gradient, 1 + 2);
}

TEST_F(SupervisorTest, ALossThatNobodyReportsCountsAfterAWhile) {
  start_team();
  const auto lost = server().runners[1].pid;
  server().runners[1].process.end();
  run();
  after(0.9 * timing::end_report_s);
  EXPECT_EQ(incidents(), 0u);
  after(0.2 * timing::end_report_s);
  EXPECT_EQ(incidents(), 1u);
  EXPECT_EQ(last_incident().exit_status, ipc::unknown_exit);
  EXPECT_EQ(server().take_request(), 1);
  server().fork(1);
  server().report_end(1, 1, lost, SIGKILL);  // It comes while the replacement starts.
  say(1, "ready");
  EXPECT_EQ(state(1), RunnerState::ready);
  EXPECT_EQ(incidents(), 1u);
}

TEST_F(SupervisorTest, ARunnerThatCannotBeForkedIsALoss) {
  start_team();
  config_.runners.restarts_per_window = 2;
  supervisor_->config_changed();
  end(1);
  for (int i = 0; i < 2; ++i) {
    after(config_.runners.restart_backoff);
    ASSERT_EQ(server().take_request(), 1);
    server().refuse(1, EMFILE);
    run();
    EXPECT_THAT(last_loss(), AllOf(HasSubstr("it could not be started"), HasSubstr("Too many open files")));
  }
  EXPECT_EQ(incidents(), 3u);
  EXPECT_THAT(given_up_why(), HasSubstr("2 restarts within 600 s (runners.restarts_per_window)"));
}

TEST_F(SupervisorTest, WhereNoLossIsAllowedItGivesUpOnce) {
  config_.runners.on_loss = LossPolicy::fail;
  start_team();
  server().end(0, SIGKILL);
  end(1);
  EXPECT_TRUE(gave_up_);
  EXPECT_EQ(given_up_why(), "runners.on_loss is fail");
  EXPECT_EQ(incidents(), 2u);
  after(100);
  EXPECT_EQ(server().take_request(), std::nullopt);
  EXPECT_THAT(message_of<SessionError>([&] { supervisor_->replace(0); }),
              HasSubstr("runners.on_loss is fail"));
  EXPECT_THAT(supervisor_->resize(1).refused, HasSubstr("runners.on_loss is fail"));
}

TEST_F(SupervisorTest, TheRestGoOnWhereTheTeamMayShrink) {
  config_.runners.on_loss = LossPolicy::shrink;
  start_team();
  end(1);
  EXPECT_EQ(control().team.load(), 1u);
  EXPECT_EQ(server().take_request(), std::nullopt);
  end(0);
  EXPECT_EQ(given_up_why(), "0 runners are left, but runners.min_runners is 1");
}

TEST_F(SupervisorTest, ARunnerThatIsLostWithAnotherIsReplacedAndDoesNotCount) {
  config_.runners.max_restarts = 1;
  start_team();
  const auto attempt = session::open_attempt(small_.session, {.participants = 3});
  end(1);
  session::refuse_attempt({small_.session, 0}, attempt, session::Reason::lost_with_another, "its device");
  end(0, W_EXITCODE(1, 0));
  EXPECT_EQ(last_loss(), "its device");
  EXPECT_EQ(given_up_why(), "");
  EXPECT_EQ(replacements(), 2U);
  expect_start(1);
  EXPECT_EQ(server().take_request(), 0);
  server().fork(0);
  end(0);
  EXPECT_THAT(given_up_why(), HasSubstr("runners.max_restarts")) << "the reason is that of the one before it";
}

TEST_F(SupervisorTest, AModelThatIsWrongIsNotTriedAgain) {
  start_team();
  small_.session.record(1).reason.store(session::Reason::model_error);
  end(1, W_EXITCODE(17, 0));
  EXPECT_EQ(given_up_why(), "a replacement would fail in the same way");
}

TEST_F(SupervisorTest, WhoRunsOutOfMemoryInTheSameStepAgainIsNotTriedAThirdTime) {
  start_team();
  const auto lose = [&](int rank, const char* what) {
    const auto attempt = session::open_attempt(small_.session, {.participants = 3});
    session::refuse_attempt({small_.session, rank}, attempt, session::Reason::exception, what);
    end(rank, W_EXITCODE(17, 0));
    after(timing::longest_backoff_s);
    session::close_if_over(view_, attempt);
    start_runners();
  };
  constexpr const char* too_little = "CUDA out of memory. Tried to allocate 20.00 MiB";
  lose(1, too_little);
  lose(0, too_little);  // Another rank.
  lose(1, "something else");
  lose(1, too_little);
  commit();
  finish_slices(small_.session.word().attempt);
  session::close_if_over(view_, small_.session.word().attempt);
  lose(1, too_little);  // In the next step.
  EXPECT_EQ(given_up_why(), "");
  lose(1, too_little);
  EXPECT_THAT(given_up_why(), AllOf(HasSubstr("runner 1 and its replacement have both run out of memory"),
                                    HasSubstr("batch_size_per_device")));
}

TEST_F(SupervisorTest, ARunnerThatDoesNotFinishACommittedAttemptIsKilledAndIfItDoesNotEndTheRunEnds) {
  config_.runners.reduction_timeout = 5;
  start_team();
  commit();
  watch(10);
  end(0);
  EXPECT_EQ(incidents(), 1u);
  EXPECT_THAT(last_loss(), HasSubstr("does not finish its part of a committed step"));
  EXPECT_FALSE(gave_up_);
  after(timing::sits_in_kernel_s);
  EXPECT_TRUE(gave_up_);
  EXPECT_THAT(given_up_why(), HasSubstr("was killed but has not ended: it is blocked in the kernel"));
}

// ---- The fork server ----

TEST_F(SupervisorTest, ALostForkServerIsOneLossAndIsReplacedWhenItsRunnersHaveEnded) {
  start_team();
  auto& first = server();
  first.die();
  run();
  EXPECT_EQ(incidents(), 1u);
  EXPECT_EQ(last_incident().rank, -1);
  first.runners[0].process.end();
  run();
  EXPECT_EQ(servers_.size(), 1u) << "runner 1 may still write to the session";
  first.runners[1].process.end();
  run();
  ASSERT_EQ(servers_.size(), 2u);
  expect_start(0);
  expect_start(1);
  EXPECT_EQ(supervisor_->started().runners.size(), 2u);
  EXPECT_EQ(incidents(), 1u);
  EXPECT_EQ(replacements(), 2u);
  EXPECT_EQ(server().runners[0].generation, 2u);
}

TEST_F(SupervisorTest, ALostForkServerIsReplacedWhereARunnerThatWasLetGoIsTheLastToEnd) {
  start_team();
  supervisor_->resize(1);
  auto& first = server();
  first.die();
  first.runners[0].process.end();
  run();
  EXPECT_EQ(servers_.size(), 1u);
  first.runners[1].process.end();
  run();
  ASSERT_EQ(servers_.size(), 2u);
  expect_start(0);
  EXPECT_EQ(server().take_request(), std::nullopt);
  EXPECT_EQ(state(1), RunnerState::absent);
}

TEST_F(SupervisorTest, AForkServerThatStartsNobodyIsReplaced) {
  start_team();
  auto& first = server();
  first.end(1, SIGKILL);
  run();
  ASSERT_EQ(first.take_request(), 1);
  after(61);  // It is killed now.
  first.die();
  first.runners[0].process.end();
  run();
  ASSERT_EQ(servers_.size(), 2u);
  after(config_.runners.restart_backoff);
  start_runners();
  EXPECT_EQ(supervisor_->started().runners.size(), 2u);
  EXPECT_EQ(incidents(), 2u);
}

// ---- The team ----

TEST_F(SupervisorTest, ARunnerThatIsReplacedMayEndByItselfAndIsNoLoss) {
  start_team();
  supervisor_->replace(1);
  EXPECT_EQ(state(1), RunnerState::retiring);
  EXPECT_TRUE(ipc::is_closed(server().runners[1].lifeline.get())) << "so it hears that it is to end";
  EXPECT_THAT(message_of<SessionError>([&] { supervisor_->replace(1); }),
              HasSubstr("is being replaced already"));
  EXPECT_EQ(server().take_request(), std::nullopt);
  end(1, 0);
  expect_start(1);
  EXPECT_EQ(incidents(), 0u);
  EXPECT_EQ(replacements(), 1u);
}

TEST_F(SupervisorTest, AResizeLetsRunnersGoAndTakesThemBack) {
  start_team();
  EXPECT_EQ(supervisor_->resize(1).refused, "");
  EXPECT_EQ(control().team.load(), 1u);
  EXPECT_EQ(state(1), RunnerState::retiring);
  EXPECT_EQ(supervisor_->resize(2).refused, "");
  EXPECT_EQ(server().take_request(), std::nullopt) << "the one that was let go has not ended";
  end(1, 0);
  expect_start(1);
  EXPECT_EQ(supervisor_->started().runners.size(), 2u);
  EXPECT_EQ(incidents(), 0u);
  EXPECT_THAT(supervisor_->resize(3).refused, HasSubstr("the session has room for 2 runners, not 3"));
}

session::SmallSession with_a_frozen_tensor(int ranks, std::uint64_t count) {
  session::Manifest manifest;
  for (const auto group : {session::Group::decay, session::Group::frozen})
    manifest.tensors.push_back(session::tensor_of(count, DType::float32, group));
  auto session = session::session_of(manifest, ranks);
  return {std::move(manifest), std::move(session)};
}

class UnfrozenTest : public Supervised {
 protected:
  UnfrozenTest() : Supervised(2, with_a_frozen_tensor(2, 1 << 20)) {}
};

TEST_F(UnfrozenTest, ARankThatAResizeAddsHasMemoryForWhatWasUnfrozenBefore) {
  view_.control().team.store(1);
  start_team();
  const auto allocated_bytes = [&] { return session::allocated_bytes(small_.session.fds()[2]); };
  const auto& tensor = small_.manifest.tensors[1];
  small_.session.allocate_room(tensor.gradient, tensor.gradient_bytes(), tensor.slab, tensor.slab_bytes(), 1);
  small_.session.unfrozen()[1].store(1);
  const auto before = allocated_bytes();
  ASSERT_EQ(supervisor_->resize(2).refused, "");
  EXPECT_GE(allocated_bytes(), before + tensor.slab_bytes());
}

TEST_F(SupervisorTest, ARankThatAResizeRemovesIsNoLongerWanted) {
  start_team();
  end(1);
  server().take_request();
  server().refuse(1, EAGAIN);
  run();  // Wanted again when its backoff is over.
  supervisor_->resize(1);
  after(100);
  EXPECT_EQ(server().take_request(), std::nullopt);
}

}  // namespace
}  // namespace accelmgr::manager::test
