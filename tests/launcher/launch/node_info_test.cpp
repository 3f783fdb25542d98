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

TEST(NodeInfo, IsThatOfThisProcessAndItsNode) {
  ASSERT_EQ(::setenv("ACCELMGR_MACHINE_TEST", "a=b", 1), 0);
  const auto node_info = this_node();
  ASSERT_EQ(::unsetenv("ACCELMGR_MACHINE_TEST"), 0);
  EXPECT_EQ(node_info.environment.at("ACCELMGR_MACHINE_TEST"), "a=b");
  std::array<char, 256> name{};
  ASSERT_EQ(::gethostname(name.data(), name.size() - 1), 0);
  EXPECT_EQ(node_info.hostname, name.data());
  EXPECT_NE(std::ranges::find(node_info.addresses, "127.0.0.1"), node_info.addresses.end());
  EXPECT_EQ(node_info.cores, ipc::cores().count);
}

}  // namespace
}  // namespace accelmgr::launch
