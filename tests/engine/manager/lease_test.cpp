// Tests of who may drive the session of a service (lease.hpp).
#include "engine/manager/lease.hpp"

#include <gmock/gmock.h>
#include <sys/mman.h>

#include "supervised.hpp"

namespace accelmgr::manager::test {
namespace {

using State = Lease::State;
using testing::HasSubstr;

class LeaseTest : public Supervised {
 protected:
  /// A host, as its service sees it.
  struct Host {
    pid_t pid = 0;
    Process process;
    base::UniqueFd socket;
    protocol::Opening opening;
    std::size_t runners = 0;

    void ask(const protocol::Request& request) const {
      protocol::send_request(socket.get(), request, opening.lease);
    }
  };

  void SetUp() override {
    start_team();
    lease_.emplace(
        loop_, view_, *supervisor_, "/checkpoints", Tenure::of_service,
        Lease::Events{.save =
                          [this](protocol::Save save) {
                            if (save.step == refused_step) throw SystemError("starting a thread", EAGAIN);
                            saves_.push_back(save.step);
                          },
                      .freed = [this] { ++freed_; },
                      .saved = [this](const protocol::Saved& saved) { told_.push_back(saved.step); }});
  }

  Host admit(pid_t pid) {
    Host host{.pid = pid, .process = {}, .socket = {}, .opening = {}};
    host.socket = lease_->admit({.name = "train.py", .pid = pid, .pidfd = host.process.pidfd()},
                                {.configuration = "nprocs: 2", .run_id = "run"});
    host.opening =
        std::get<protocol::Opening>(protocol::receive_answer(host.socket.get(), base::Deadline::at_ns(0)));
    host.runners = std::get<protocol::Started>(
                       protocol::receive_answer(host.socket.get(), base::Deadline::in_seconds(1)))
                       .runners.size();
    return host;
  }
  Lease::Local drive_here() {
    return lease_->drive_here([this] { ++over_; });
  }
  void leave(Lease::Local& local) {
    local.socket.reset();
    run();
  }
  /// Lets the lease look until it is free, as it does at intervals. False if it does not become free.
  bool becomes_free() {
    run();
    for (int looks = 0; looks < 5 && lease_->state() != State::free; ++looks) {
      loop_.restart();
      loop_.run_one_for(std::chrono::nanoseconds(2 * timing::look_ns));
    }
    return lease_->state() == State::free;
  }
  void ask_for_checkpoint(const base::UniqueFd& socket, std::uint64_t lease, std::uint64_t step) {
    const auto file = [] { return base::UniqueFd(memfd_create("checkpoint", MFD_CLOEXEC)); };
    protocol::send_request(
        socket.get(),
        protocol::Save{.step = step, .model = file(), .training = file(), .description = file()}, lease);
    run();
  }
  void ask_for_checkpoint(const Host& host, std::uint64_t step) {
    ask_for_checkpoint(host.socket, host.opening.lease, step);
  }
  static protocol::Saved written(std::uint64_t step, const std::string& folder) {
    return {.step = step, .path = folder + "/step", .bytes = 1, .write_ms = 1, .error = {}, .warnings = {}};
  }

  static constexpr std::uint64_t refused_step = 13;  ///< For its checkpoint there is no thread to be had.
  std::vector<std::uint64_t> saves_, told_;
  int freed_ = 0, over_ = 0;
  std::optional<Lease> lease_;
};

TEST_F(LeaseTest, AHostGetsANumberOfItsOwnAndWhatItNeedsToDrive) {
  auto first = admit(100);
  EXPECT_EQ(first.opening.lease, 1u);
  EXPECT_EQ(control().lease.load(), 1u);
  EXPECT_EQ(first.runners, 2u);
  EXPECT_FALSE(first.opening.session.empty());
  EXPECT_EQ(lease_->standing().pid, 100);
  EXPECT_TRUE(lease_->standing().has_host());
  first.ask(protocol::Leave{});
  ASSERT_TRUE(becomes_free());
  EXPECT_EQ(control().lease.load(), 0u);
  EXPECT_FALSE(lease_->standing().has_host());
  EXPECT_EQ(admit(200).opening.lease, 2u);
}

TEST_F(LeaseTest, AHostThatClosesItsSocketHasLeftWhenItsProcessHasEndedOrItGivesUpItsMappings) {
  auto host = admit(100);
  host.socket.reset();
  EXPECT_FALSE(becomes_free()) << "it still maps the session";
  EXPECT_EQ(lease_->state(), State::leaving);
  host.process.end();
  EXPECT_TRUE(becomes_free());
  EXPECT_EQ(freed_, 1);

  host = admit(100);
  host.socket.reset();
  run();
  lease_->asks_again(200);
  EXPECT_EQ(lease_->state(), State::leaving) << "that was another process";
  lease_->asks_again(100);
  EXPECT_EQ(lease_->state(), State::free);

  host = admit(100);
  lease_->take_back(7);
  EXPECT_EQ(lease_->state(), State::driven);
  lease_->take_back(host.opening.lease);  // It never heard of it.
  EXPECT_EQ(lease_->state(), State::free);
}

TEST_F(LeaseTest, WhatAnEarlierHostSendsOrLeavesDoesNotReachTheNext) {
  auto first = admit(100);
  first.ask(protocol::Leave{});
  ASSERT_TRUE(becomes_free());
  const auto second = admit(200);
  protocol::send_request(second.socket.get(), protocol::Leave{}, first.opening.lease);
  first.process.end();
  first.socket.reset();
  run();
  EXPECT_EQ(lease_->state(), State::driven);
  EXPECT_EQ(lease_->number(), second.opening.lease);
  EXPECT_EQ(lease_->host().pid, 200);
}

TEST_F(LeaseTest, AnAttemptEndsWithItsHostAndACommittedOneIsReducedBeforeTheSessionIsFree) {
  auto host = admit(100);
  session::open_attempt(small_.session, {.participants = 3});
  host.process.end();
  EXPECT_TRUE(becomes_free()) << "a child may hold its socket";
  EXPECT_TRUE(small_.session.word().closed);
  EXPECT_EQ(lease_->steps(), 0u);
  host = admit(200);
  const auto attempt = commit();
  host.process.end();
  EXPECT_FALSE(becomes_free());
  finish_slices(attempt);
  EXPECT_TRUE(becomes_free());
  EXPECT_EQ(lease_->steps(), 1u);
}

TEST_F(LeaseTest, WhatAHostLeavesHalfWrittenIsToldUntilAWriteIsWhole) {
  auto host = admit(100);
  auto& written = small_.session.control();
  written.parameter_version.fetch_add(1);
  host.process.end();
  ASSERT_TRUE(becomes_free());
  EXPECT_EQ(lease_->unfinished(),
            "process 100 (train.py) ended while it wrote parameters: they are half new and half old");
  EXPECT_EQ(control().half_written.load(), 1u);
  EXPECT_EQ(written.parameter_version.load() % 2, 0u);

  const auto second = admit(200);
  EXPECT_EQ(second.opening.unfinished, lease_->unfinished());
  second.ask(protocol::Leave{});
  ASSERT_TRUE(becomes_free());
  EXPECT_THAT(lease_->unfinished(), HasSubstr("process 100")) << "the second one has written nothing";

  const auto third = admit(300);
  written.writes.fetch_add(1);
  third.ask(protocol::Leave{});
  ASSERT_TRUE(becomes_free());
  EXPECT_EQ(lease_->unfinished(), "");
  EXPECT_EQ(control().half_written.load(), 0u);
}

TEST_F(LeaseTest, TheOutcomeOfACheckpointIsForTheHostOrTheServiceThatAskedForIt) {
  const auto first = admit(100);
  ask_for_checkpoint(first, 5);
  first.ask(protocol::Leave{});
  ASSERT_TRUE(becomes_free());
  EXPECT_TRUE(lease_->is_saving());
  const auto second = admit(200);
  ask_for_checkpoint(second, 6);
  EXPECT_EQ(saves_, (std::vector<std::uint64_t>{5, 6}));
  EXPECT_EQ(lease_->saves_of_host(), 1u);
  lease_->saved(written(5, "/checkpoints"));
  run();
  EXPECT_TRUE(told_.empty());
  EXPECT_EQ(lease_->saved_step(), 5u);
  lease_->saved(written(6, "/elsewhere"));
  run();
  EXPECT_EQ(told_, (std::vector<std::uint64_t>{6}));
  EXPECT_EQ(lease_->saved_step(), 5u) << "the other one is not in checkpoint.directory";
  EXPECT_EQ(std::get<protocol::Saved>(protocol::next_notice(second.socket.get()).value()).step, 6u);
  EXPECT_FALSE(lease_->is_saving());

  const auto local = drive_here();
  ask_for_checkpoint(local.socket, local.number, 7);
  EXPECT_EQ(lease_->saves_of_host(), 0u);
  lease_->saved(written(7, "/checkpoints"));
  run();
  EXPECT_EQ(told_, (std::vector<std::uint64_t>{6}));
  EXPECT_EQ(protocol::next_notice(second.socket.get()), std::nullopt);
  EXPECT_EQ(std::get<protocol::Saved>(protocol::next_notice(local.socket.get()).value()).step, 7u);
}

TEST_F(LeaseTest, ACheckpointThatCannotBeBegunFailsAlone) {
  const auto host = admit(100);
  ask_for_checkpoint(host, refused_step);
  const auto answer = std::get<protocol::Saved>(protocol::next_notice(host.socket.get()).value());
  EXPECT_EQ(answer.step, refused_step);
  EXPECT_THAT(answer.error, HasSubstr("starting a thread"));
  EXPECT_FALSE(lease_->is_saving());
  ask_for_checkpoint(host, 6);
  EXPECT_EQ(saves_, (std::vector<std::uint64_t>{6}));
}

TEST_F(LeaseTest, AHostAndTheServiceHearOfReplacementsWhileTheyDrive) {
  const auto host = admit(100);
  const auto local = drive_here();
  end(1);
  expect_start(1);
  for (const int socket : {host.socket.get(), local.socket.get()}) {
    const auto joined = std::get<protocol::Joined>(protocol::next_notice(socket).value());
    EXPECT_EQ(joined.rank, 1);
    EXPECT_EQ(joined.generation, 2u);
  }
  host.ask(protocol::Leave{});
  ASSERT_TRUE(becomes_free());
  supervisor_->replace(0);
  end(0, 0);
  expect_start(0);
  EXPECT_EQ(protocol::next_notice(host.socket.get()), std::nullopt);
}

// ---- While a thread of the service drives ----

TEST_F(LeaseTest, AHostWaitsWhileTheServiceDrivesAndTheAttemptOfTheServiceDoesNotEndWithIt) {
  auto host = admit(100);
  auto local = drive_here();
  EXPECT_TRUE(lease_->is_driven_here());
  EXPECT_EQ(lease_->number(), host.opening.lease);
  EXPECT_EQ(control().lease.load(), local.number) << "the host would be refused";
  EXPECT_EQ(local.started.runners.size(), 2u);
  const auto attempt = session::open_attempt(small_.session, {.participants = 3});
  host.process.end();
  ASSERT_TRUE(becomes_free());
  EXPECT_EQ(freed_, 1);
  EXPECT_FALSE(small_.session.word().closed);
  EXPECT_EQ(small_.session.word().attempt, attempt);
  const auto second = admit(200);
  EXPECT_EQ(control().lease.load(), local.number);
  leave(local);
  EXPECT_EQ(over_, 1);
  EXPECT_FALSE(lease_->is_driven_here());
  EXPECT_TRUE(small_.session.word().closed);
  EXPECT_EQ(control().lease.load(), second.opening.lease);
  EXPECT_EQ(lease_->state(), State::driven);
}

TEST_F(LeaseTest, TheServiceIsOverWhenItsCommittedAttemptIsReduced) {
  auto local = drive_here();
  const auto attempt = commit();
  leave(local);
  EXPECT_EQ(over_, 0);
  EXPECT_TRUE(lease_->is_driven_here());
  finish_slices(attempt);
  loop_.restart();
  loop_.run_one_for(std::chrono::nanoseconds(2 * timing::look_ns));
  EXPECT_EQ(over_, 1);
  EXPECT_EQ(control().lease.load(), 0u);
  EXPECT_EQ(lease_->steps(), 1u);
}

}  // namespace
}  // namespace accelmgr::manager::test
