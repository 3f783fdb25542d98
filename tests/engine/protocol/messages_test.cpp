#include "engine/protocol/messages.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <typeinfo>

#include "accelmgr/errors.hpp"
#include "base/ipc/socket.hpp"
#include "fuzzed.hpp"

namespace accelmgr::protocol {
namespace {

base::Deadline soon() { return base::Deadline::in_seconds(60); }

class MessagesTest : public testing::Test {
 protected:
  MessagesTest() { std::tie(host, manager) = ipc::socket_pair(); }

  /// What the host raises when the manager has failed so.
  template <class Exception>
  Exception raised(const Exception& error) {
    send_failed(manager.get(), error);
    try {
      raise(std::get<Failed>(receive_answer(host.get(), soon())));
    } catch (const Exception& arrived) {
      EXPECT_TRUE(typeid(arrived) == typeid(error)) << arrived.what();
      return arrived;
    }
  }

  base::UniqueFd host, manager;
};

/// Tests recognize /dev/null and /dev/zero by their device numbers.
base::UniqueFd open_device(const char* path) { return base::UniqueFd(open(path, O_RDONLY | O_CLOEXEC)); }
base::UniqueFd null() { return open_device("/dev/null"); }
base::UniqueFd zero() { return open_device("/dev/zero"); }

Save save_with(base::UniqueFd training) {
  Save save;
  save.step = 17;
  save.model = null();
  save.training = std::move(training);
  save.description = null();
  return save;
}

dev_t device(const base::UniqueFd& fd) {
  struct stat status {};
  EXPECT_EQ(fstat(fd.get(), &status), 0);
  return status.st_rdev;
}

TEST_F(MessagesTest, StartedPassesEveryDescriptorInItsPlace) {
  Started sent;
  sent.fork_server_pidfd = zero();
  sent.runners.push_back({.rank = 0, .generation = 1, .pid = 7, .pidfd = null()});
  sent.runners.push_back({.rank = 2, .generation = 5, .pid = 9, .pidfd = zero()});
  send_started(manager.get(), sent);
  auto answer = receive_answer(host.get(), soon());
  auto& started = std::get<Started>(answer);
  EXPECT_EQ(device(started.fork_server_pidfd), device(zero()));
  ASSERT_EQ(started.runners.size(), 2u);
  EXPECT_EQ(started.runners[1].rank, 2);
  EXPECT_EQ(started.runners[1].generation, 5u);
  EXPECT_EQ(started.runners[1].pid, 9);
  EXPECT_EQ(device(started.runners[0].pidfd), device(null()));
  EXPECT_EQ(device(started.runners[1].pidfd), device(zero()));
}

TEST_F(MessagesTest, ABeginningWithASessionToGoOnWithArrives) {
  const std::string yaml = "data:\n" + std::string(1'000'000, 'x');  // More than a socket holds.
  send_begin(host.get(), {.configuration = yaml});
  auto begin = receive_begin(manager.get(), soon());
  EXPECT_EQ(begin.configuration, yaml);
  EXPECT_TRUE(begin.session.empty());
  EXPECT_FALSE(begin.reads_again);
  const auto first = zero(), second = null();
  send_begin(host.get(), {.reads_again = true}, {first.get(), second.get()});
  send_free(host.get());
  begin = receive_begin(manager.get(), soon());
  receive_free(manager.get(), soon());
  EXPECT_EQ(begin.configuration, "");
  EXPECT_TRUE(begin.reads_again);
  ASSERT_EQ(begin.session.size(), 2u);
  EXPECT_EQ(device(begin.session[0]), device(zero()));
  EXPECT_EQ(device(begin.session[1]), device(null()));
}

TEST_F(MessagesTest, AHostThatTakesNoNoteOfTheSessionIsWaitedForUntilTheDeadline) {
  send_noted(host.get());
  receive_noted(manager.get(), soon());
  EXPECT_THROW(receive_noted(manager.get(), base::Deadline::in_seconds(0.01)), SessionError);
  send_free(host.get());
  EXPECT_THROW(receive_noted(manager.get(), soon()), SessionError) << "that is another message";
  host.reset();
  EXPECT_THROW(receive_noted(manager.get(), soon()), SessionError);
}

TEST_F(MessagesTest, RequestsArriveInTheirOrderAndTheEndOfTheHostIsAStop) {
  EXPECT_FALSE(next_request(manager.get(), 1));
  send_request(host.get(), Resize{3}, 1);
  send_request(host.get(), save_with(zero()), 1);
  auto locked = save_with(null());
  locked.lock = zero();
  send_request(host.get(), std::move(locked), 1);
  auto request = next_request(manager.get(), 1);
  EXPECT_EQ(std::get<Resize>(*request).ranks, 3);
  request = next_request(manager.get(), 1);
  EXPECT_EQ(std::get<Save>(*request).step, 17u);
  EXPECT_EQ(device(std::get<Save>(*request).training), device(zero()));
  EXPECT_FALSE(std::get<Save>(*request).lock);
  request = next_request(manager.get(), 1);
  EXPECT_EQ(device(std::get<Save>(*request).description), device(null()));
  EXPECT_EQ(device(std::get<Save>(*request).lock), device(zero()));
  host.reset();
  request = next_request(manager.get(), 1);
  EXPECT_TRUE(std::holds_alternative<Closed>(*request));
}

TEST_F(MessagesTest, WhatAHostNeedsArrives) {
  const auto memory = zero(), slab = null();
  const std::string yaml(1'000'000, 'x');  // More than a socket holds, while nobody reads.
  send_opening(manager.get(),
               {.tenure = Tenure::of_service,
                .lease = 3,
                .configuration = yaml,
                .needs_values = true,
                .run_id = "5f",
                .unfinished = "half",
                .pending_steps = 7,
                .checkpoint = "/a/step-00000007",
                .state = null(),
                .training = zero()},
               {memory.get(), slab.get()});
  const auto answer = receive_answer(host.get(), soon());
  const auto& opening = std::get<Opening>(answer);
  EXPECT_EQ(opening.tenure, Tenure::of_service);
  EXPECT_EQ(opening.lease, 3u);
  EXPECT_EQ(opening.configuration, yaml);
  EXPECT_TRUE(opening.needs_values);
  EXPECT_EQ(opening.run_id, "5f");
  EXPECT_EQ(opening.unfinished, "half");
  EXPECT_EQ(opening.pending_steps, 7);
  EXPECT_EQ(opening.checkpoint, "/a/step-00000007");
  EXPECT_EQ(device(opening.state), device(null()));
  EXPECT_EQ(device(opening.training), device(zero()));
  ASSERT_EQ(opening.session.size(), 2u);
  EXPECT_EQ(device(opening.session[1]), device(null()));
}

// A host whose lease has ended may have sent a request before it knew.
TEST_F(MessagesTest, ARequestUnderAnotherLeaseIsRefused) {
  send_request(host.get(), Resize{1}, 2);
  ipc::send(host.get(), R"({"type": "Leave"})");
  send_request(host.get(), Leave{}, 3);
  auto request = next_request(manager.get(), 3);
  EXPECT_NE(std::get<Refused>(*request).why.find("lease 2"), std::string::npos);
  request = next_request(manager.get(), 3);
  EXPECT_TRUE(std::holds_alternative<Refused>(*request));
  request = next_request(manager.get(), 3);
  EXPECT_TRUE(std::holds_alternative<Leave>(*request));
}

TEST_F(MessagesTest, APacketThatIsEmptyOrTooLongIsRefusedAndNotTheEnd) {
  ASSERT_TRUE(test::send_raw(host.get(), ""));
  ASSERT_TRUE(test::send_raw(host.get(), std::string(ipc::max_packet_bytes + 1, ' ')));
  send_request(host.get(), Resize{2}, 1);
  EXPECT_TRUE(std::holds_alternative<Refused>(*next_request(manager.get(), 1)));
  EXPECT_TRUE(std::holds_alternative<Refused>(*next_request(manager.get(), 1)));
  EXPECT_EQ(std::get<Resize>(*next_request(manager.get(), 1)).ranks, 2);
}

TEST_F(MessagesTest, ARefusalSaysWhichFieldOfWhomAndWhatIsRight) {
  ipc::send(host.get(), R"({"type": "Resize", "ranks": 99, "lease": 1})");
  EXPECT_EQ(std::get<Refused>(*next_request(manager.get(), 1)).why,
            "a request of the host: 'ranks' is 99; it must be an integer from 1 to 24");
  ipc::send(host.get(), R"({"type": "Attach", "lease": 1})");
  EXPECT_EQ(std::get<Refused>(*next_request(manager.get(), 1)).why,
            "a request of the host: 'type' is \"Attach\"; it must be Leave, Resize or Save");
}

TEST_F(MessagesTest, AFloodOfWhatIsNoNoticeKeepsTheHostForABoundedTimeOnly) {
  int sent = 0;
  while (sent < 1000 && test::send_raw(manager.get(), "x")) ++sent;
  ASSERT_GT(sent, 100);
  EXPECT_FALSE(next_notice(host.get()));
  EXPECT_TRUE(ipc::is_readable(host.get())) << "it went on for as long as there was something";
}

TEST_F(MessagesTest, ASaveWhoseMemoryFindsNoRoomSaysSo) {
  send_request(host.get(), save_with(null()), 1);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const auto lowest_free = static_cast<rlim_t>(null().get());
  const rlimit none{.rlim_cur = lowest_free, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const auto request = next_request(manager.get(), 1);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(std::get<Save>(*request).step, 17u);
  EXPECT_NE(std::get<Save>(*request).missing.find("ulimit -n"), std::string::npos);
  EXPECT_FALSE(next_request(manager.get(), 1));
}

TEST_F(MessagesTest, NoticesArriveInTheirOrder) {
  EXPECT_FALSE(next_notice(host.get()));
  EXPECT_TRUE(send_notice(manager.get(), Joined{.rank = 1, .generation = 4, .pid = 8, .pidfd = zero()}));
  EXPECT_TRUE(send_notice(manager.get(), Relaunched{.pidfd = null()}));
  EXPECT_TRUE(send_notice(manager.get(), Resized{.refused = "no memory"}));
  EXPECT_TRUE(send_notice(
      manager.get(),
      Saved{.step = 5, .path = "/x", .bytes = 6, .write_ms = 1.5, .error = "", .warnings = {"old"}}));
  auto notice = next_notice(host.get());
  EXPECT_EQ(std::get<Joined>(*notice).generation, 4u);
  EXPECT_EQ(device(std::get<Joined>(*notice).pidfd), device(zero()));
  notice = next_notice(host.get());
  EXPECT_EQ(device(std::get<Relaunched>(*notice).pidfd), device(null()));
  notice = next_notice(host.get());
  EXPECT_EQ(std::get<Resized>(*notice).refused, "no memory");
  notice = next_notice(host.get());
  EXPECT_EQ(std::get<Saved>(*notice).bytes, 6u);
  EXPECT_EQ(std::get<Saved>(*notice).warnings.at(0), "old");
}

TEST_F(MessagesTest, AHostThatReadsNothingDoesNotHoldUpTheManager) {
  std::size_t sent = 0;
  constexpr std::size_t far_more_than_a_socket_holds = 100'000;
  while (sent < far_more_than_a_socket_holds && send_notice(manager.get(), Resized{.refused = "x"})) ++sent;
  EXPECT_LT(sent, far_more_than_a_socket_holds);
  for (std::size_t i = 0; i < sent; ++i) EXPECT_TRUE(next_notice(host.get()));
  EXPECT_TRUE(send_notice(manager.get(), Resized{}));
}

TEST_F(MessagesTest, AFailureArrivesAsTheExceptionItWas) {
  raised(ModelError("no loss"));
  raised(DataError("no file"));
  raised(SessionError("no memory"));
  raised(UsageError("no init"));
  raised(CheckpointError("truncated"));
  EXPECT_STREQ(raised(Error("something")).what(), "something");
  EXPECT_EQ(raised(ConfigError("out of range", "nprocs")).key(), "nprocs");
  const auto lost = raised(RunnerError("killed", 3, "forward"));
  EXPECT_EQ(lost.rank(), 3);
  EXPECT_EQ(lost.phase(), "forward");
}

TEST_F(MessagesTest, AFailureLongerThanAPacketArrivesWithItsBeginningAndItsEnd) {
  for (const char filling : {'x', '\x01', '\xe2'}) {  // \x01 takes six bytes in JSON.
    send_failed(manager.get(), ModelError("it begins " + std::string(1'000'000, filling) + " and ends"));
    const auto what = std::get<Failed>(receive_answer(host.get(), soon())).what;
    EXPECT_TRUE(what.starts_with("it begins "));
    EXPECT_TRUE(what.ends_with(" and ends"));
    EXPECT_NE(what.find("bytes are left out here"), std::string::npos);
  }
}

TEST_F(MessagesTest, WarningsLongerThanAPacketArriveInPart) {
  Saved sent{.step = 7, .path = "/x", .bytes = 6, .write_ms = 1.5, .error = "", .warnings = {}};
  for (int i = 0; i < 5000; ++i) sent.warnings.push_back("folder " + std::to_string(i) + " cannot be read");
  EXPECT_TRUE(send_notice(manager.get(), sent));
  const auto notice = next_notice(host.get());
  ASSERT_TRUE(notice);
  const auto& warnings = std::get<Saved>(*notice).warnings;
  EXPECT_EQ(warnings.front(), "folder 0 cannot be read");
  EXPECT_EQ(warnings.back(), "and " + std::to_string(5001 - warnings.size()) + " more");
  EXPECT_GT(warnings.size(), 500u);
}

TEST_F(MessagesTest, TextThatIsNoUtf8DoesNotBreakTheAnswer) {
  send_failed(manager.get(), DataError("file \xff\xfe"));
  EXPECT_NE(std::get<Failed>(receive_answer(host.get(), soon())).what.find("file"), std::string::npos);
}

TEST_F(MessagesTest, TheEndOfThePeerIsSaid) {
  manager.reset();
  EXPECT_THROW(receive_answer(host.get(), soon()), SessionError);
  EXPECT_FALSE(next_notice(host.get())) << "as if there were none; its pidfd tells";
  EXPECT_THROW(send_request(host.get(), Leave{}, 1), SystemError);
  auto [ours, theirs] = ipc::socket_pair();
  theirs.reset();
  EXPECT_THROW(receive_begin(ours.get(), soon()), SessionError);
}

TEST_F(MessagesTest, WaitingForAnAnswerEndsAtTheDeadline) {
  EXPECT_THROW(receive_answer(host.get(), base::Deadline::in_seconds(0.01)), SessionError);
}

}  // namespace
}  // namespace accelmgr::protocol
