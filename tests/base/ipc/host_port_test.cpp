// Tests of reading and writing HOST:PORT.
#include "base/ipc/host_port.hpp"

#include <gmock/gmock.h>

#include <string>
#include <tuple>
#include <utility>

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

TEST(BadHostPort, IsRefusedWithTheReason) {
  const std::pair<std::string, std::string> flaws[] = {
      {"", "has no port"},
      {"host", "has no port"},
      {"host:", "has no port"},
      {":1", "has no host"},
      {"host:x", "the port is 'x'"},
      {"host:1x", "the port is '1x'"},
      {"host: 1", "the port is ' 1'"},
      {"host:-1", "the port is '-1'"},
      {"host:+1", "the port is '+1'"},
      {"host:65536", "from 1 to 65535"},
      {"host:99999999999999999999", "the port is"},
      {"ho st:1", "'ho st' is not the name or address of a host"},
      {"a/b:1", "is not the name or address of a host"},
      {"::1", "in brackets"},
      {"::1:80", "in brackets"},
      {"a:1:2", "in brackets"},
      {"[::1", "'[' without ']'"},
      {"[::1]", "has no port"},
      {"[]:1", "has no host"},
      {"[::1]1", "has no port"},
      {"[:: 1]:1", "is not the name or address of a host"}};
  for (const auto& flaw : flaws)
    EXPECT_THAT(message_of<ConfigError>([&] { parse_host_port(flaw.first); }),
                AllOf(HasSubstr("'" + flaw.first + "' is not HOST:PORT"), HasSubstr(flaw.second)));
}

}  // namespace
}  // namespace accelmgr::ipc
