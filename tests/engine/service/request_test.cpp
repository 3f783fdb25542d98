#include "engine/service/request.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "base/ipc/socket.hpp"
#include "engine/service/query.hpp"
#include "message_of.hpp"

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
  const auto error = json::parse(Problem(500, "internal", "\xff\xfe").response().body)["error"];
  for (const auto* field : {"rank", "step", "hint"}) EXPECT_TRUE(error.at(field).is_null()) << field;
}

TEST(Query, ANumberIsWithinItsBoundsOrRefusedWithThem) {
  EXPECT_EQ(whole_number("1", "limit", 1, 256), 1u);
  EXPECT_EQ(whole_number("256", "limit", 1, 256), 256u);
  for (const auto* text :
       {"", "0", "257", "-1", "+1", "1.5", " 1", "1 ", "0x10", "99999999999999999999", "x"})
    EXPECT_EQ(test::message_of<Problem>([&] { whole_number(text, "limit", 1, 256); }),
              fmt::format("limit is '{}'; it must be a whole number from 1 to 256", text));
}

TEST(Query, AParameterThatIsNotKnownOrMissingIsRefused) {
  const Request request{.method = "GET", .path = "/v1/steps", .query = {{"since", "1"}, {"limits", "2"}}};
  const auto whole = Parameter::Type::integer;
  EXPECT_NO_THROW(check_query(request, {{"since", whole, ""}, {"limits", whole, ""}}));
  EXPECT_THROW(check_query(request, {{"since", whole, ""}, {"limit", whole, ""}}), Problem);
  EXPECT_THROW(check_query(request, {{"since", whole, ""}, {"limits", whole, "", 3, 9}}), Problem);
  EXPECT_THROW(check_query({.method = "POST", .path = "/v1/restart"}, {{"rank", whole, "", 0, 1, true}}),
               Problem);
}

TEST(Body, FieldsAreCheckedAgainstWhatIsKnown) {
  const std::vector<Parameter> known{{"count", Parameter::Type::integer, "", 1, 10, true},
                                     {"timeout_s", Parameter::Type::number, "", 0, 5},
                                     {"all", Parameter::Type::flag, ""}};
  const auto check = [&](const char* body) {
    return checked_body({.method = "POST", .path = "/", .body = body}, known);
  };
  EXPECT_EQ(check(R"({"count": 10, "timeout_s": 0.5, "all": true})").size(), 3u);
  EXPECT_EQ(check(R"({"count": 2.0})").at("count").get<int>(), 2);
  for (const auto* wrong :
       {"", "{}", "[]", "1", "{", R"({"count": 0})", R"({"count": 11})", R"({"count": -1})",
        R"({"count": 1.5})", R"({"count": "1"})", R"({"count": true})", R"({"count": null})",
        R"({"count": 1, "timeout_s": 5.1})", R"({"count": 1, "timeout_s": -0.1})",
        R"({"count": 1, "timeout_s": "1"})", R"({"count": 1, "all": 1})", R"({"count": 1, "counts": 1})",
        R"({"count": 1e99})"})
    EXPECT_THROW(check(wrong), Problem) << wrong;
}

TEST(Body, OneOfBracketsIsRefused) {
  const std::vector<Parameter> known{{"count", Parameter::Type::integer, "", 1, 10}};
  constexpr std::size_t deep = 32'000;  // More than a stack of calls holds, and a body of 64 KiB.
  const auto open = std::string(deep, '['), closed = open + std::string(deep, ']');
  for (const auto& body : {open, closed, "{\"count\":" + closed + "}", "{\"x\":" + closed + "}"})
    EXPECT_THROW(checked_body({.method = "POST", .path = "/", .body = body}, known), Problem)
        << body.substr(0, 10);
}

TEST(Peer, OfAnotherUserMayNotUseAServiceUnlessItIsOfItsGroup) {
  const auto [ours, theirs] = ipc::socket_pair();
  auto peer = peer_of(ours.get());
  EXPECT_EQ(peer.pid, getpid());
  EXPECT_EQ(peer.uid, geteuid());
  EXPECT_TRUE(may_use(peer, ours.get(), {}));
  peer.uid = geteuid() + 1;
  EXPECT_FALSE(may_use(peer, ours.get(), {}));
  EXPECT_TRUE(may_use(peer, ours.get(), {.group = getegid()}));
  EXPECT_FALSE(may_use(peer, ours.get(), {.group = 54321}));
}

}  // namespace
}  // namespace accelmgr::service
