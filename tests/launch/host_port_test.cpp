// HOST:PORT in texts.
#include "launch/host_port.hpp"

#include <ostream>

#include "launch/machines.hpp"

namespace accelmgr::launch {
namespace {

TEST(HostPort, IsReadAndWrittenAlike) {
  for (const auto& [written, host, port] :
       {std::tuple("localhost:1", "localhost", 1), std::tuple("10.0.0.1:65535", "10.0.0.1", 65535),
        std::tuple("node-1.cluster_a:80", "node-1.cluster_a", 80), std::tuple("[::1]:1234", "::1", 1234),
        std::tuple("[fe80::1%eth0]:2", "fe80::1%eth0", 2),
        std::tuple("[::ffff:1.2.3.4]:5", "::ffff:1.2.3.4", 5)}) {
    EXPECT_EQ(parse_host_port(written), (HostPort{host, port})) << written;
    EXPECT_EQ(text(HostPort{host, port}), written);
  }
}

TEST(HostPort, MayHavePortZeroWhereAnyWillDo) {
  EXPECT_EQ(parse_host_port("localhost:0", 0), (HostPort{"localhost", 0}));
  EXPECT_TRUE(says(refusal([] { parse_host_port("localhost:0"); }).first, {"'0'", "from 1 to 65535"}));
}

struct Case {
  std::string written, why;
};

void PrintTo(const Case& c, std::ostream* out) { *out << "'" << c.written << "'"; }

class BadHostPort : public ::testing::TestWithParam<Case> {};

TEST_P(BadHostPort, IsRefusedWithTheReason) {
  const auto [text, key] = refusal([] { parse_host_port(GetParam().written); });
  EXPECT_TRUE(says(text, {"'" + GetParam().written + "' is no HOST:PORT", GetParam().why}));
}

INSTANTIATE_TEST_SUITE_P(
    Launch, BadHostPort,
    ::testing::Values(Case{"", "has no port"}, Case{"host", "has no port"}, Case{"host:", "has no port"},
                      Case{":1", "has no host"}, Case{"host:x", "the port is 'x'"},
                      Case{"host:1x", "the port is '1x'"}, Case{"host: 1", "the port is ' 1'"},
                      Case{"host:-1", "the port is '-1'"}, Case{"host:+1", "the port is '+1'"},
                      Case{"host:65536", "from 1 to 65535"}, Case{"host:99999999999999999999", "the port is"},
                      Case{"ho st:1", "'ho st' is no host"}, Case{"a/b:1", "is no host"},
                      Case{"::1", "in brackets"}, Case{"::1:80", "in brackets"}, Case{"a:1:2", "in brackets"},
                      Case{"[::1", "'[' without ']'"}, Case{"[::1]", "has no port"},
                      Case{"[]:1", "has no host"}, Case{"[::1]1", "has no port"},
                      Case{"[:: 1]:1", "is no host"}));

}  // namespace
}  // namespace accelmgr::launch
