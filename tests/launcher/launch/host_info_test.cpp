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

// A process looks for the plug-in only once, so no other test of this program may ask for it.
TEST(HostInfo, KnowsWhyGlooCannotBeUsed) {
  ASSERT_EQ(::setenv("ACCELMGR_GLOO_PLUGIN", "/nowhere/gloo.so", 1), 0);
  const auto of_gloo = refusal([] { resolve({.nprocs = 1, .backend = "gloo"}, this_host()); }).text;
  const auto of_unknown = refusal([] { resolve({.nprocs = 1, .backend = "glo"}, this_host()); }).text;
  ASSERT_EQ(::unsetenv("ACCELMGR_GLOO_PLUGIN"), 0);
  EXPECT_TRUE(says(of_gloo, {"/nowhere/gloo.so: no such file"}));
  EXPECT_TRUE(says(of_unknown, {"available are serial, shm, auto"}));
}

TEST(HostInfo, CanLaunchAnything) {
  const auto spec = resolve({.nprocs = 1}, this_host());
  EXPECT_EQ(spec.nprocs, 1);
  EXPECT_FALSE(text(spec).empty());
}

}  // namespace
}  // namespace accelmgr::launch
