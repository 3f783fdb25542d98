// Tests of NodeInfo of this node.
#include "launcher/launch/plan/node_info.hpp"

#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "base/ipc/cores.hpp"
#include "launcher/launch/nodes.hpp"

namespace accelmgr::launch {
namespace {

TEST(NodeInfo, KnowsItsEnvironment) {
  ASSERT_EQ(::setenv("ACCELMGR_MACHINE_TEST", "a=b", 1), 0);
  const auto environment = this_node().environment;
  ASSERT_EQ(::unsetenv("ACCELMGR_MACHINE_TEST"), 0);
  EXPECT_EQ(environment.at("ACCELMGR_MACHINE_TEST"), "a=b");
}

TEST(NodeInfo, KnowsItsNameAndAddresses) {
  const auto node_info = this_node();
  std::array<char, 256> name{};
  ASSERT_EQ(::gethostname(name.data(), name.size() - 1), 0);
  EXPECT_EQ(node_info.hostname, name.data());
  EXPECT_NE(std::ranges::find(node_info.addresses, "127.0.0.1"), node_info.addresses.end());
}

TEST(NodeInfo, CountsTheCoresThatThisProcessMayRunOn) { EXPECT_EQ(this_node().cores, ipc::cores().count); }

TEST(NodeInfo, CanLaunchAnything) {
  const auto spec = resolve({.nprocs = 1}, this_node());
  EXPECT_EQ(spec.nprocs, 1);
  EXPECT_FALSE(text(spec).empty());
}

}  // namespace
}  // namespace accelmgr::launch
