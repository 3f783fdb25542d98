#include "service/request.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "ipc/socket.hpp"
#include "service/query.hpp"

namespace accelmgr::service {
namespace {

using nlohmann::json;

TEST(Problem, HasOneForm) {
  const auto response =
      Problem(409, "host_drives", "train.py drives", {.rank = 1, .step = 7, .hint = "wait"}).response();
  EXPECT_EQ(response.status, 409);
  EXPECT_EQ(response.type, "application/json");
  EXPECT_EQ(json::parse(response.body),
            json::parse(R"({"error": {"code": "host_drives", "message": "train.py drives",
      "rank": 1, "step": 7, "hint": "wait"}})"));
}

TEST(Problem, WhatItDoesNotConcernIsNull) {
  const auto error = json::parse(Problem(404, "unknown_request", "no").response().body)["error"];
  for (const auto* field : {"rank", "step", "hint"}) EXPECT_TRUE(error.at(field).is_null()) << field;
}

TEST(Problem, TextThatIsNoUtf8MakesAResponse) {
  EXPECT_TRUE(json::accept(Problem(500, "internal", "\xff\xfe").response().body));
}

std::string message_of(const std::string& number) {
  try {
    whole_number(number, "limit", 1, 256);
  } catch (const Problem& problem) {
    return problem.what();
  }
  return {};
}

TEST(Query, ANumberIsWithinItsBoundsOrRefusedWithThem) {
  EXPECT_EQ(whole_number("1", "limit", 1, 256), 1u);
  EXPECT_EQ(whole_number("256", "limit", 1, 256), 256u);
  for (const auto* text :
       {"", "0", "257", "-1", "+1", "1.5", " 1", "1 ", "0x10", "99999999999999999999", "x"})
    EXPECT_EQ(message_of(text), fmt::format("limit is '{}'; it must be a whole number from 1 to 256", text));
}

TEST(Query, AParameterThatIsNotKnownIsRefused) {
  const Request request{.method = "GET", .path = "/v1/steps", .query = {{"since", "1"}, {"limits", "2"}}};
  EXPECT_NO_THROW(check_query(request, {"since", "limits"}));
  EXPECT_THROW(check_query(request, {"since", "limit"}), Problem);
}

TEST(Peer, IsTheOtherProcess) {
  const auto [ours, theirs] = ipc::socket_pair();
  const auto peer = peer_of(ours.get());
  EXPECT_EQ(peer.pid, getpid());
  EXPECT_EQ(peer.uid, geteuid());
  EXPECT_TRUE(may_use(peer, ours.get(), {}));
}

TEST(Peer, OfAnotherUserMayNotUseAServiceUnlessItIsOfItsGroup) {
  const auto [ours, theirs] = ipc::socket_pair();
  auto peer = peer_of(ours.get());
  peer.uid = geteuid() + 1;
  EXPECT_FALSE(may_use(peer, ours.get(), {}));
  EXPECT_TRUE(may_use(peer, ours.get(), {.group = getegid()}));
  EXPECT_FALSE(may_use(peer, ours.get(), {.group = 54321}));
}

}  // namespace
}  // namespace accelmgr::service
