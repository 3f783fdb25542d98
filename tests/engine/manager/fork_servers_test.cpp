#include "engine/manager/fork_servers.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

#include "base/ipc/process.hpp"
#include "engine/support/expectations.hpp"

namespace accelmgr::manager {
namespace {

TEST(ForkServers, OneThatEndsBeforeItHasItsConfigurationIsLostAsAnyOther) {
  Config config;
  config.data.options["text"] = std::string(4 << 20, 'x');  // More than the socket takes unread.
  const auto host = ipc::open_pidfd(getpid());
  ipc::set_self({"/bin/true"});
  const auto fork_server = execute_fork_server(config, host.get());
  ipc::set_self({});
  EXPECT_TRUE(ipc::wait_ended(fork_server.pidfd(), test::soon()));
}

}  // namespace
}  // namespace accelmgr::manager
