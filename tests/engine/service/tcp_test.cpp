// Who may ask a service over TCP: those who state its token, which only its user can read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <memory>

#include "accelmgr/errors.hpp"
#include "base/ipc/network.hpp"
#include "engine/service/tcp_listener.hpp"
#include "engine/service/token.hpp"
#include "message_of.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::service {
namespace {

using test::message_of;
using testing::HasSubstr;

class TokenTest : public testing::Test {
 protected:
  Token token_of(const std::string& text, mode_t mode = 0600) const {
    const auto path = folder_.write("token", text);
    EXPECT_EQ(chmod(path.c_str(), mode), 0);
    return Token::from_file(path);
  }
  std::string why_not(const std::string& text, mode_t mode = 0600) const {
    return message_of<ConfigError>([&] { token_of(text, mode); });
  }
  test::TemporaryFolder folder_;
};

TEST_F(TokenTest, IsStatedByTheWholeFirstLineAlone) {
  const auto token = token_of("0123456789abcdef\nanother line");
  for (const auto* authorization :
       {"Bearer 0123456789abcdef", "bearer 0123456789abcdef", "BEARER 0123456789abcdef"})
    EXPECT_TRUE(token.is_stated_by(authorization)) << authorization;
  for (const auto* wrong :
       {"", "Bearer", "Bearer ", "Basic 0123456789abcdef", "0123456789abcdef", "Bearer 0123456789abcde",
        "Bearer 0123456789abcdeg", "Bearer 0123456789abcdef0", "Bearer 0123456789abcdef ",
        "Bearer  0123456789abcdef", "Bearer 1123456789abcdef"})
    EXPECT_FALSE(token.is_stated_by(wrong)) << wrong;
  EXPECT_FALSE(token.is_stated_by(std::string_view("Bearer 0123456789abcdef\0", 24)));
}

TEST_F(TokenTest, AFileThatOthersMayReadIsRefused) {
  for (const mode_t mode : {0640u, 0604u})
    EXPECT_THAT(why_not("0123456789abcdef", mode), HasSubstr("chmod 600"));
}

TEST_F(TokenTest, AFileOfAnotherUserIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can give a file away";
  const auto path = folder_.write("token", "0123456789abcdef");
  ASSERT_EQ(chmod(path.c_str(), 0400), 0);
  ASSERT_EQ(chown(path.c_str(), 65534, 65534), 0);
  EXPECT_THAT(message_of<ConfigError>([&] { Token::from_file(path); }), HasSubstr("belongs to user 65534"));
}

TEST_F(TokenTest, AWeakOrBrokenTokenIsRefusedWithACommandThatMakesOne) {
  for (const auto& text : {std::string(), std::string("\n0123456789abcdef"), std::string("0123456789abcde"),
                           std::string(513, 'x')})
    EXPECT_THAT(why_not(text), HasSubstr("16 to 512 characters; `openssl rand -hex 32`"));
  for (const auto* text : {"0123456789 abcdef", "0123456789abcdef\r\n"})
    EXPECT_THAT(why_not(text), HasSubstr("no spaces; `openssl rand -hex 32`"));
  for (const auto* text : {"secret", "a secret with spaces"})
    EXPECT_THAT(why_not(text), testing::Not(HasSubstr("secret")));
}

TEST_F(TokenTest, WhatIsNoFileIsRefused) {
  EXPECT_THAT(message_of<ConfigError>([&] { Token::from_file(folder_ / "none"); }),
              HasSubstr("No such file"));
  EXPECT_THAT(message_of<ConfigError>([&] { Token::from_file(folder_ / "."); }),
              HasSubstr("not a regular file"));
}

TEST(TcpListener, WithoutAHostOnlyThisMachineReachesIt) {
  const auto listener = listen_at(":0");
  EXPECT_EQ(listener.address, "127.0.0.1:" + std::to_string(ipc::bound_port(listener.fd.get())));
  EXPECT_FALSE(listener.others_reach_it);
  EXPECT_FALSE(listen_at("localhost:0").others_reach_it);
  EXPECT_TRUE(listen_at("0.0.0.0:0").others_reach_it);
}

TEST(TcpListener, AWrongAddressIsRefusedWithWhatIsRight) {
  const auto why_not = [](const std::string& address) {
    return message_of<ConfigError>([&] { listen_at(address); });
  };
  for (const std::string address :
       {"127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:http", "::1:80", "256.0.0.1:0"})
    EXPECT_THAT(why_not(address), HasSubstr("--http '" + address + "'"));
  const auto listener = listen_at(":0");
  EXPECT_THAT(why_not(listener.address), HasSubstr("in use"));
}

}  // namespace
}  // namespace accelmgr::service
