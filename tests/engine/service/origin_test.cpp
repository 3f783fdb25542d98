#include "engine/service/origin.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <string>

namespace accelmgr::service {
namespace {

Request request_with(const std::string& method, std::map<std::string, std::string> header,
                     std::shared_ptr<const Peer> peer = std::make_shared<Peer>()) {
  return {.method = method, .path = "/v1/step", .header = std::move(header), .peer = std::move(peer)};
}

bool is_refused(const Request& request) {
  try {
    check_origin(request);
    return false;
  } catch (const Problem& problem) {
    EXPECT_EQ(problem.response().status, 403);
    EXPECT_NE(problem.response().body.find("\"hint\":\""), std::string::npos);
    return true;
  }
}

TEST(Origin, APageOfAnotherSiteMayChangeNothing) {
  for (const auto* site : {"cross-site", "same-site", "anything"})
    EXPECT_TRUE(is_refused(request_with("POST", {{"sec-fetch-site", site}}))) << site;
  for (const auto* site : {"same-origin", "none"})
    EXPECT_FALSE(is_refused(request_with("POST", {{"sec-fetch-site", site}}))) << site;
  EXPECT_TRUE(is_refused(
      request_with("POST", {{"sec-fetch-site", "cross-site"}, {"origin", "http://a"}, {"host", "a"}})));
  EXPECT_TRUE(is_refused(request_with("POST", {{"sec-fetch-site", "cross-site"}}, nullptr))) << "over TCP";
  // A link leads to the dashboard, and what is only read stays with the browser.
  EXPECT_FALSE(is_refused(request_with("GET", {{"sec-fetch-site", "cross-site"}, {"host", "localhost"}})));
}

TEST(Origin, WithoutFetchMetadataItsOriginIsComparedWithTheHost) {
  for (const auto* origin : {"null", "http://evil.example", "http://localhost:81", "http://localhost",
                             "localhost:80", "http://localhost:80.evil.example", "://"})
    EXPECT_TRUE(is_refused(request_with("POST", {{"origin", origin}, {"host", "localhost:80"}}))) << origin;
  EXPECT_TRUE(is_refused(request_with("POST", {{"origin", "http://localhost"}})));
  for (const auto* origin : {"http://localhost:80", "https://LOCALHOST:80"})
    EXPECT_FALSE(is_refused(request_with("POST", {{"origin", origin}, {"host", "localhost:80"}}))) << origin;
  EXPECT_FALSE(is_refused(request_with("POST", {{"host", "localhost:80"}})));
}

TEST(Origin, WithoutATokenAHostIsNoNameOfTheInternet) {
  for (const auto* host :
       {"evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", "localhost.",
        "[evil.example]", "1.2.3", ".localhost.evil", "[::1].evil.example"})
    for (const auto* method : {"GET", "POST"})
      EXPECT_TRUE(is_refused(request_with(method, {{"host", host}}))) << host;
  for (const auto* host : {"localhost", "localhost:8080", "127.0.0.1", "127.0.0.1:80", "192.168.0.7", "[::1]",
                           "[::1]:80", "accelmgr", "unix", "", "run.localhost:80", "["})
    EXPECT_FALSE(is_refused(request_with("GET", {{"host", host}}))) << host;
  EXPECT_FALSE(is_refused(request_with("GET", {})));
  // Over TCP a page does not know the token, whatever its name points to.
  EXPECT_FALSE(is_refused(request_with("POST", {{"host", "gpu7.lab.example:8080"}}, nullptr)));
}

}  // namespace
}  // namespace accelmgr::service
