// Who may ask a service over TCP: those who state its token, which only its user can read.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <fstream>
#include <memory>

#include "accelmgr/errors.hpp"
#include "ipc/network.hpp"
#include "message_of.hpp"
#include "service/tcp_listener.hpp"
#include "service/token.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::service {
namespace {

using test::message_of;
using testing::HasSubstr;

class TokenTest : public testing::Test {
 protected:
  Token token_of(const std::string& text, mode_t mode = 0600) const {
    const auto path = (folder_ / "token").string();
    std::ofstream(path) << text;
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
  EXPECT_TRUE(token.is_stated_by("Bearer 0123456789abcdef"));
  for (const auto* wrong :
       {"", "Bearer", "Bearer ", "bearer 0123456789abcdef", "Basic 0123456789abcdef", "0123456789abcdef",
        "Bearer 0123456789abcde", "Bearer 0123456789abcdeg", "Bearer 0123456789abcdef0",
        "Bearer 0123456789abcdef ", "Bearer  0123456789abcdef", "Bearer 1123456789abcdef"})
    EXPECT_FALSE(token.is_stated_by(wrong)) << wrong;
  EXPECT_FALSE(token.is_stated_by(std::string_view("Bearer 0123456789abcdef\0", 24)));
}

TEST_F(TokenTest, AFileThatOthersMayReadIsRefused) {
  EXPECT_THAT(why_not("0123456789abcdef", 0640), HasSubstr("chmod 600"));
  EXPECT_THAT(why_not("0123456789abcdef", 0604), HasSubstr("chmod 600"));
}

TEST_F(TokenTest, AWeakOrBrokenTokenIsRefusedWithACommandThatMakesOne) {
  EXPECT_THAT(why_not(""), HasSubstr("openssl rand -hex 32"));
  EXPECT_THAT(why_not("\n0123456789abcdef"), HasSubstr("16 to 512 characters"));
  EXPECT_THAT(why_not("0123456789abcde"), HasSubstr("16 to 512 characters"));
  EXPECT_THAT(why_not(std::string(513, 'x')), HasSubstr("16 to 512 characters"));
  EXPECT_THAT(why_not("0123456789 abcdef"), HasSubstr("no spaces"));
  EXPECT_THAT(why_not("0123456789abcdef\r\n"), HasSubstr("no spaces"));
}

TEST_F(TokenTest, WhatIsNoFileIsRefused) {
  EXPECT_THAT(message_of<ConfigError>([&] { Token::from_file(folder_ / "none"); }),
              HasSubstr("No such file"));
  EXPECT_THAT(message_of<ConfigError>([&] { Token::from_file(folder_ / "."); }),
              HasSubstr("not a regular file"));
}

// No error says what is in the file.
TEST_F(TokenTest, IsInNoMessage) {
  EXPECT_THAT(why_not("secret", 0600), testing::Not(HasSubstr("secret")));
  EXPECT_THAT(why_not("a secret with spaces"), testing::Not(HasSubstr("secret")));
}

TEST(TcpListener, WithoutAHostOnlyThisMachineReachesIt) {
  const auto listener = listen_at(":0");
  EXPECT_EQ(listener.address, "127.0.0.1:" + std::to_string(ipc::bound_port(listener.fd.get())));
  EXPECT_FALSE(listener.others_reach_it);
  EXPECT_FALSE(listen_at("localhost:0").others_reach_it);
}

TEST(TcpListener, SaysWhetherOthersReachIt) { EXPECT_TRUE(listen_at("0.0.0.0:0").others_reach_it); }

TEST(TcpListener, AWrongAddressIsRefusedWithWhatIsRight) {
  const auto why_not = [](const std::string& address) {
    return message_of<ConfigError>([&] { listen_at(address); });
  };
  EXPECT_THAT(why_not("127.0.0.1"), HasSubstr("HOST:PORT"));
  EXPECT_THAT(why_not("127.0.0.1:"), HasSubstr("no port"));
  EXPECT_THAT(why_not("127.0.0.1:65536"), HasSubstr("0 to 65535"));
  EXPECT_THAT(why_not("127.0.0.1:http"), HasSubstr("0 to 65535"));
  EXPECT_THAT(why_not("::1:80"), HasSubstr("brackets"));
  EXPECT_THAT(why_not("256.0.0.1:0"), HasSubstr("--http '256.0.0.1:0'"));
  const auto listener = listen_at(":0");
  EXPECT_THAT(why_not(listener.address), HasSubstr("in use"));
}

}  // namespace
}  // namespace accelmgr::service
