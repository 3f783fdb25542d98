// Fuzz tests of what surrounds the messages of the protocol. tests/fuzz/messages.cpp has the messages.
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

class FuzzTest : public testing::Test {
 protected:
  FuzzTest() {
    std::tie(ours, theirs) = ipc::socket_pair();
    base::log().spdlog().set_level(
        spdlog::level::off);  // Silences refusals; a test below checks how many there are.
  }
  ~FuzzTest() override { base::log().spdlog().set_level(spdlog::level::warn); }

  base::UniqueFd ours, theirs;
  Fuzzed fuzzed{20261122};
  std::string last;
};

TEST_F(FuzzTest, APacketThatIsEmptyOrTooLongIsNotTheEnd) {
  ASSERT_TRUE(test::send_raw(theirs.get(), ""));
  ASSERT_TRUE(test::send_raw(theirs.get(), std::string(ipc::max_packet_bytes + 1, ' ')));
  send_request(theirs.get(), Resize{2});
  EXPECT_TRUE(std::holds_alternative<Refused>(*next_request(ours.get())));
  EXPECT_TRUE(std::holds_alternative<Refused>(*next_request(ours.get())));
  EXPECT_EQ(std::get<Resize>(*next_request(ours.get())).ranks, 2);
}

TEST_F(FuzzTest, ARefusalSaysWhichFieldOfWhomAndWhatIsRight) {
  test::send_raw(theirs.get(), json{{"type", "Resize"}, {"ranks", 99}}.dump());
  EXPECT_EQ(std::get<Refused>(*next_request(ours.get())).why,
            "a request of the host: 'ranks' is 99; it must be an integer from 1 to 24");
  test::send_raw(theirs.get(), json{{"type", "Attach"}}.dump());
  EXPECT_EQ(std::get<Refused>(*next_request(ours.get())).why,
            "a request of the host: 'type' is \"Attach\"; it must be Leave, Resize or Save");
}

TEST_F(FuzzTest, AFloodOfWhatIsNoNoticeKeepsTheHostForABoundedTimeOnly) {
  int sent = 0;
  while (sent < 1000 && test::send_raw(theirs.get(), "x")) ++sent;
  ASSERT_GT(sent, 100);
  EXPECT_FALSE(next_notice(ours.get()));
  EXPECT_TRUE(ipc::is_readable(ours.get())) << "it went on for as long as there was something";
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
