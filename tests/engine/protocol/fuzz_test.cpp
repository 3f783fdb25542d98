// Fuzz tests of every function that receives messages of the protocol, with messages that no host and no
// manager sends.
#include <gtest/gtest.h>
#include <spdlog/spdlog.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "accelmgr/errors.hpp"
#include "base/ipc/socket.hpp"
#include "base/log.hpp"
#include "engine/protocol/messages.hpp"
#include "engine/session/step_word.hpp"
#include "fuzzed.hpp"

namespace accelmgr::protocol {
namespace {

using nlohmann::json;
using test::Fuzzed;

constexpr int rounds = 4000;

base::Deadline at_once() { return base::Deadline::in_seconds(10); }

const std::vector<json> requests = {{{"type", "Stop"}},
                                    {{"type", "Resize"}, {"ranks", 3}},
                                    {{"type", "Save"}, {"step", 17}},
                                    {{"type", "Attach"}, {"name", "a request of a later version"}}};
const std::vector<json> notices = {{{"type", "Resized"}, {"refused", "no memory"}},
                                   {{"type", "Saved"},
                                    {"step", 5},
                                    {"path", "/x"},
                                    {"bytes", 6},
                                    {"write_ms", 1.5},
                                    {"error", ""},
                                    {"warnings", {"old"}}},
                                   {{"type", "Joined"}, {"rank", 1}, {"generation", 4}, {"pid", 8}},
                                   {{"type", "Relaunched"}}};
const std::vector<json> answers = {
    {{"type", "Prepared"}},
    {{"type", "Assigned"}, {"nprocs", 2}, {"device", "cuda"}, {"devices", {"GPU-a", "cpu"}}},
    {{"type", "Started"},
     {"runners",
      {{{"rank", 0}, {"generation", 1}, {"pid", 7}}, {{"rank", 2}, {"generation", 5}, {"pid", 9}}}}},
    {{"type", "RunnerError"}, {"what", "killed"}, {"key", ""}, {"rank", 3}, {"phase", "forward"}}};

class FuzzTest : public testing::Test {
 protected:
  FuzzTest() {
    std::tie(ours, theirs) = ipc::socket_pair();
    base::log().spdlog().set_level(
        spdlog::level::off);  // Silences refusals; a test below checks how many there are.
  }
  ~FuzzTest() override { base::log().spdlog().set_level(spdlog::level::warn); }

  /// A valid packet with changes, or random bytes.
  std::string packet(const std::vector<json>& valid) {
    if (fuzzed.one_in(50)) return std::string(ipc::max_packet_bytes + fuzzed.below(2), ' ');
    if (fuzzed.one_in(10)) return fuzzed.bytes(200);
    auto message = valid[fuzzed.below(valid.size())];
    if (fuzzed.one_in(4)) return fuzzed.mutated(message.dump());
    if (!fuzzed.one_in(8)) message = fuzzed.mutated(std::move(message));
    return message.dump(-1, ' ', false, json::error_handler_t::replace);
  }

  /// Receives many packets. Each must be accepted or throw SessionError.
  void expect_only_session_errors(const std::vector<json>& valid, const std::function<void()>& receive) {
    const auto open_before = test::open_count();
    int refused = 0;
    for (int round = 0; round < rounds; ++round) {
      last = packet(valid);
      ASSERT_TRUE(test::send_raw(theirs.get(), last, test::some_descriptors(fuzzed, 5)));
      try {
        receive();
      } catch (const SessionError&) {
        ++refused;
      } catch (const std::exception& error) {
        FAIL() << error.what() << " in round " << round << ": " << last;
      }
      ASSERT_FALSE(ipc::is_readable(ours.get())) << "round " << round << ": " << last;
    }
    EXPECT_EQ(test::open_count(), open_before) << "descriptors of packets are left open";
    EXPECT_GT(refused, rounds / 4);
    EXPECT_LT(refused, rounds) << "not one was right";
  }

  static void expect_right(const Joined& runner) {
    EXPECT_TRUE(runner.rank >= 0 && runner.rank < session::max_ranks) << runner.rank;
    EXPECT_GT(runner.pid, 1);
    EXPECT_TRUE(runner.pidfd);
  }

  base::UniqueFd ours, theirs;
  Fuzzed fuzzed{20261122};
  std::string last;
};

TEST_F(FuzzTest, ARequestThatIsNoneIsRefusedAndNeverAStop) {
  int refused = 0, right = 0;
  const auto open_before = test::open_count();
  for (int round = 0; round < rounds; ++round) {
    last = packet(requests);
    ASSERT_TRUE(test::send_raw(theirs.get(), last, test::some_descriptors(fuzzed, 5)));
    const auto request = next_request(ours.get());
    ASSERT_TRUE(request) << last;
    if (std::holds_alternative<Stop>(*request)) {
      EXPECT_EQ(json::parse(last, nullptr, false).value("type", ""), "Stop") << last;
    } else if (const auto* resize = std::get_if<Resize>(&*request)) {
      EXPECT_TRUE(resize->ranks >= 1 && resize->ranks <= session::max_ranks) << last;
      ++right;
    } else if (const auto* save = std::get_if<Save>(&*request)) {
      EXPECT_TRUE(save->model && save->training && save->description) << last;
      ++right;
    } else {
      EXPECT_FALSE(std::get<Refused>(*request).why.empty());
      ++refused;
    }
  }
  EXPECT_EQ(test::open_count(), open_before) << "descriptors of packets are left open";
  EXPECT_GT(refused, rounds / 4);
  EXPECT_GT(right, 0);
  send_request(theirs.get(), Resize{2});
  EXPECT_EQ(std::get<Resize>(*next_request(ours.get())).ranks, 2) << "the next one is served";
  theirs.reset();
  EXPECT_TRUE(std::holds_alternative<Stop>(*next_request(ours.get()))) << "the end is still a Stop";
}

TEST_F(FuzzTest, AnEmptyPacketIsNotTheEnd) {
  ASSERT_TRUE(test::send_raw(theirs.get(), ""));
  send_request(theirs.get(), Resize{2});
  EXPECT_TRUE(std::holds_alternative<Refused>(*next_request(ours.get())));
  EXPECT_EQ(std::get<Resize>(*next_request(ours.get())).ranks, 2);
}

TEST_F(FuzzTest, ARefusalSaysWhichFieldOfWhomAndWhatIsRight) {
  test::send_raw(theirs.get(), json{{"type", "Resize"}, {"ranks", 99}}.dump());
  EXPECT_EQ(std::get<Refused>(*next_request(ours.get())).why,
            "a request of the host: 'ranks' is 99; it must be an integer from 1 to 24");
  test::send_raw(theirs.get(), json{{"type", "Attach"}}.dump());
  EXPECT_EQ(std::get<Refused>(*next_request(ours.get())).why,
            "a request of the host: 'type' is \"Attach\"; it must be Stop, Detach, Resize or Save");
}

TEST_F(FuzzTest, WhatIsNoNoticeIsPassedOver) {
  int right = 0;
  const auto open_before = test::open_count();
  for (int round = 0; round < rounds; ++round) {
    last = packet(notices);
    ASSERT_TRUE(test::send_raw(theirs.get(), last, test::some_descriptors(fuzzed, 2)));
    const auto notice = next_notice(ours.get());
    ASSERT_FALSE(ipc::is_readable(ours.get())) << last;
    if (!notice) continue;
    ++right;
    if (const auto* runner = std::get_if<Joined>(&*notice)) expect_right(*runner);
    if (const auto* saved = std::get_if<Saved>(&*notice)) {
      EXPECT_TRUE(std::isfinite(saved->write_ms));
    }
    if (const auto* relaunched = std::get_if<Relaunched>(&*notice)) {
      EXPECT_TRUE(relaunched->pidfd);
    }
  }
  EXPECT_EQ(test::open_count(), open_before) << "descriptors of packets are left open";
  EXPECT_TRUE(right > 0 && right < rounds) << right;
}

TEST_F(FuzzTest, AFloodOfWhatIsNoNoticeKeepsTheHostForABoundedTimeOnly) {
  int sent = 0;
  while (sent < 1000 && test::send_raw(theirs.get(), "x")) ++sent;
  ASSERT_GT(sent, 100);
  EXPECT_FALSE(next_notice(ours.get()));
  EXPECT_TRUE(ipc::is_readable(ours.get())) << "it went on for as long as there was something";
}

TEST_F(FuzzTest, AnswersOfTheStartAreWhatTheyMustBeOrErrors) {
  expect_only_session_errors(answers, [&] {
    const auto answer = receive_answer(ours.get(), at_once());
    if (const auto* prepared = std::get_if<Prepared>(&answer)) {
      EXPECT_FALSE(prepared->session.empty());
    }
    if (const auto* assigned = std::get_if<Assigned>(&answer)) {
      EXPECT_GE(assigned->nprocs, 1);
      EXPECT_LE(assigned->nprocs, session::max_ranks);
    }
    if (const auto* failed = std::get_if<Failed>(&answer)) {
      EXPECT_THROW(raise(*failed), Error);
    }
    if (const auto* started = std::get_if<Started>(&answer)) {
      EXPECT_TRUE(started->fork_server_pidfd);
      for (const auto& runner : started->runners) expect_right(runner);
    }
  });
}

TEST_F(FuzzTest, TheBeginningIsWhatItMustBeOrAnError) {
  for (int round = 0; round < rounds; ++round) {
    const bool begins = fuzzed.one_in(2);
    last = begins ? "Begin" : fuzzed.mutated(std::string("Begin"));
    auto passed = test::some_descriptors(fuzzed, 30);
    ASSERT_TRUE(test::send_raw(theirs.get(), last, passed));
    try {
      EXPECT_EQ(receive_begin(ours.get(), at_once()).size(), passed.size());
      EXPECT_LE(passed.size(), 1u + session::max_ranks);
      EXPECT_EQ(last, "Begin");
    } catch (const SessionError&) {
      EXPECT_TRUE(!begins || passed.size() > 1 + session::max_ranks) << last;
    }
  }
}

TEST_F(FuzzTest, OnlyANoteOfTheSessionLetsTheManagerGoOn) {
  for (int round = 0; round < rounds; ++round) {
    last = fuzzed.one_in(2) ? "Noted" : fuzzed.mutated(std::string("Noted"));
    ASSERT_TRUE(test::send_raw(theirs.get(), last));
    try {
      send_prepared(ours.get(), {}, fuzzed.one_in(2), at_once());
      EXPECT_EQ(last, "Noted");
    } catch (const SessionError&) {
      EXPECT_NE(last, "Noted");
    }
    ipc::receive(theirs.get(), at_once());
  }
}

TEST_F(FuzzTest, AConfigurationIsATextOfTheLengthAnnouncedOrAnError) {
  for (int round = 0; round < rounds / 4; ++round) {
    auto [reader, writer] = ipc::socket_pair();
    const auto text = fuzzed.bytes(100);
    std::uint64_t length = fuzzed.one_in(2) ? text.size() : fuzzed.edge();
    std::string first(reinterpret_cast<const char*>(&length), sizeof length);
    test::send_raw(writer.get(), fuzzed.one_in(4) ? fuzzed.mutated(first) : first);
    for (auto rest = text; !rest.empty();) {
      const auto part = 1 + fuzzed.below(rest.size());
      test::send_raw(writer.get(), rest.substr(0, part), test::some_descriptors(fuzzed, 1));
      rest.erase(0, part);
      if (fuzzed.one_in(8)) test::send_raw(writer.get(), "");
    }
    writer.reset();
    try {
      EXPECT_TRUE(text.starts_with(receive_configuration(reader.get(), at_once())));
    } catch (const SessionError&) {
    }
  }
}

}  // namespace
}  // namespace accelmgr::protocol
