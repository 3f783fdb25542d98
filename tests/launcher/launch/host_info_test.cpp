// Tests of HostInfo of this host.
#include "launcher/launch/plan/host_info.hpp"

#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <array>

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

TEST(HostInfo, CountsTheCoresThatThisProcessMayRunOn) {
  cpu_set_t allowed;
  ASSERT_EQ(::sched_getaffinity(0, sizeof allowed, &allowed), 0);
  EXPECT_EQ(this_host().cores, CPU_COUNT(&allowed));
  int one = 0;
  while (!CPU_ISSET(one, &allowed)) ++one;
  cpu_set_t single;
  CPU_ZERO(&single);
  CPU_SET(one, &single);
  ASSERT_EQ(::sched_setaffinity(0, sizeof single, &single), 0);
  const int cores = this_host().cores;
  ASSERT_EQ(::sched_setaffinity(0, sizeof allowed, &allowed), 0);
  EXPECT_EQ(cores, 1);
}

TEST(HostInfo, CanLaunchAnything) {
  const auto spec = resolve({.nprocs = 1}, this_host());
  EXPECT_EQ(spec.nprocs, 1);
  EXPECT_FALSE(text(spec).empty());
}

}  // namespace
}  // namespace accelmgr::launch
