// Tests of HostInfo of this host.
#include "launcher/launch/plan/host_info.hpp"

#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "base/ipc/cores.hpp"
#include "launcher/launch/hosts.hpp"

namespace accelmgr::launch {
namespace {

TEST(HostInfo, KnowsItsEnvironment) {
  ASSERT_EQ(::setenv("ACCELMGR_MACHINE_TEST", "a=b", 1), 0);
  const auto environment = this_host().environment;
  ASSERT_EQ(::unsetenv("ACCELMGR_MACHINE_TEST"), 0);
  EXPECT_EQ(environment.at("ACCELMGR_MACHINE_TEST"), "a=b");
}

TEST(HostInfo, KnowsItsNameAndAddresses) {
  const auto host_info = this_host();
  std::array<char, 256> name{};
  ASSERT_EQ(::gethostname(name.data(), name.size() - 1), 0);
  EXPECT_EQ(host_info.hostname, name.data());
  EXPECT_NE(std::ranges::find(host_info.addresses, "127.0.0.1"), host_info.addresses.end());
}

TEST(HostInfo, CountsTheCoresThatThisProcessMayRunOn) { EXPECT_EQ(this_host().cores, ipc::cores().count); }

TEST(HostInfo, CanLaunchAnything) {
  const auto spec = resolve({.nprocs = 1}, this_host());
  EXPECT_EQ(spec.nprocs, 1);
  EXPECT_FALSE(text(spec).empty());
}

}  // namespace
}  // namespace accelmgr::launch
