// Fuzz tests of what surrounds the messages of the protocol. tests/fuzz/messages.cpp has the messages.
#include <gtest/gtest.h>
#include <spdlog/spdlog.h>

#include <nlohmann/json.hpp>

#include "accelmgr/errors.hpp"
#include "base/ipc/socket.hpp"
#include "base/log.hpp"
#include "engine/protocol/messages.hpp"
#include "fuzzed.hpp"

namespace accelmgr::protocol {
namespace {

using nlohmann::json;

class FuzzTest : public testing::Test {
 protected:
  FuzzTest() {
    std::tie(ours, theirs) = ipc::socket_pair();
    base::log().spdlog().set_level(
        spdlog::level::off);  // Silences refusals; a test below checks how many there are.
  }
  ~FuzzTest() override { base::log().spdlog().set_level(spdlog::level::warn); }

  base::UniqueFd ours, theirs;
};

TEST_F(FuzzTest, APacketThatIsEmptyOrTooLongIsNotTheEnd) {
  ASSERT_TRUE(test::send_raw(theirs.get(), ""));
  ASSERT_TRUE(test::send_raw(theirs.get(), std::string(ipc::max_packet_bytes + 1, ' ')));
  send_request(theirs.get(), Resize{2}, 1);
  EXPECT_TRUE(std::holds_alternative<Refused>(*next_request(ours.get(), 1)));
  EXPECT_TRUE(std::holds_alternative<Refused>(*next_request(ours.get(), 1)));
  EXPECT_EQ(std::get<Resize>(*next_request(ours.get(), 1)).ranks, 2);
}

TEST_F(FuzzTest, ARefusalSaysWhichFieldOfWhomAndWhatIsRight) {
  test::send_raw(theirs.get(), json{{"type", "Resize"}, {"ranks", 99}, {"lease", 1}}.dump());
  EXPECT_EQ(std::get<Refused>(*next_request(ours.get(), 1)).why,
            "a request of the host: 'ranks' is 99; it must be an integer from 1 to 24");
  test::send_raw(theirs.get(), json{{"type", "Attach"}, {"lease", 1}}.dump());
  EXPECT_EQ(std::get<Refused>(*next_request(ours.get(), 1)).why,
            "a request of the host: 'type' is \"Attach\"; it must be Leave, Resize or Save");
}

TEST_F(FuzzTest, AFloodOfWhatIsNoNoticeKeepsTheHostForABoundedTimeOnly) {
  int sent = 0;
  while (sent < 1000 && test::send_raw(theirs.get(), "x")) ++sent;
  ASSERT_GT(sent, 100);
  EXPECT_FALSE(next_notice(ours.get()));
  EXPECT_TRUE(ipc::is_readable(ours.get())) << "it went on for as long as there was something";
}

}  // namespace
}  // namespace accelmgr::protocol
