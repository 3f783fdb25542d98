// Tests of reading and writing HOST:PORT.
#include "base/ipc/host_port.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <tuple>

#include "accelmgr/errors.hpp"
#include "message_of.hpp"

namespace accelmgr::ipc {
namespace {

using accelmgr::test::message_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

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
  EXPECT_THAT(message_of<ConfigError>([] { parse_host_port("localhost:0"); }),
              AllOf(HasSubstr("'0'"), HasSubstr("from 1 to 65535")));
}

struct Flaw {
  std::string written, why;
};

void PrintTo(const Flaw& c, std::ostream* out) { *out << "'" << c.written << "'"; }

class BadHostPort : public ::testing::TestWithParam<Flaw> {};

TEST_P(BadHostPort, IsRefusedWithTheReason) {
  EXPECT_THAT(message_of<ConfigError>([] { parse_host_port(GetParam().written); }),
              AllOf(HasSubstr("'" + GetParam().written + "' is not HOST:PORT"), HasSubstr(GetParam().why)));
}

INSTANTIATE_TEST_SUITE_P(
    Texts, BadHostPort,
    ::testing::Values(Flaw{"", "has no port"}, Flaw{"host", "has no port"}, Flaw{"host:", "has no port"},
                      Flaw{":1", "has no host"}, Flaw{"host:x", "the port is 'x'"},
                      Flaw{"host:1x", "the port is '1x'"}, Flaw{"host: 1", "the port is ' 1'"},
                      Flaw{"host:-1", "the port is '-1'"}, Flaw{"host:+1", "the port is '+1'"},
                      Flaw{"host:65536", "from 1 to 65535"}, Flaw{"host:99999999999999999999", "the port is"},
                      Flaw{"ho st:1", "'ho st' is not the name or address of a host"},
                      Flaw{"a/b:1", "is not the name or address of a host"}, Flaw{"::1", "in brackets"},
                      Flaw{"::1:80", "in brackets"}, Flaw{"a:1:2", "in brackets"},
                      Flaw{"[::1", "'[' without ']'"}, Flaw{"[::1]", "has no port"},
                      Flaw{"[]:1", "has no host"}, Flaw{"[::1]1", "has no port"},
                      Flaw{"[:: 1]:1", "is not the name or address of a host"}));

}  // namespace
}  // namespace accelmgr::ipc
