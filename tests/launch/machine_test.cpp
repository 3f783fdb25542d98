// What this host says of itself.
#include "launch/machine.hpp"

#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "launch/machines.hpp"

namespace accelmgr::launch {
namespace {

TEST(Machine, KnowsItsEnvironment) {
  ASSERT_EQ(::setenv("ACCELMGR_MACHINE_TEST", "a=b", 1), 0);
  const auto environment = this_machine().environment;
  ASSERT_EQ(::unsetenv("ACCELMGR_MACHINE_TEST"), 0);
  EXPECT_EQ(environment.at("ACCELMGR_MACHINE_TEST"), "a=b");
}

TEST(Machine, KnowsItsNameAndAddresses) {
  const auto machine = this_machine();
  std::array<char, 256> name{};
  ASSERT_EQ(::gethostname(name.data(), name.size() - 1), 0);
  EXPECT_EQ(machine.hostname, name.data());
  EXPECT_NE(std::ranges::find(machine.addresses, "127.0.0.1"), machine.addresses.end());
}

TEST(Machine, CountsTheCoresThatThisProcessMayRunOn) {
  cpu_set_t allowed;
  ASSERT_EQ(::sched_getaffinity(0, sizeof allowed, &allowed), 0);
  EXPECT_EQ(this_machine().cores, CPU_COUNT(&allowed));
  int one = 0;
  while (!CPU_ISSET(one, &allowed)) ++one;
  cpu_set_t single;
  CPU_ZERO(&single);
  CPU_SET(one, &single);
  ASSERT_EQ(::sched_setaffinity(0, sizeof single, &single), 0);
  const int cores = this_machine().cores;
  ASSERT_EQ(::sched_setaffinity(0, sizeof allowed, &allowed), 0);
  EXPECT_EQ(cores, 1);
}

// The plug-in is looked for once in a process; no other test of this program asks for it.
TEST(Machine, KnowsWhyGlooCannotBeUsed) {
  ASSERT_EQ(::setenv("ACCELMGR_GLOO_PLUGIN", "/nowhere/gloo.so", 1), 0);
  const auto of_gloo = refusal([] { resolve({.nprocs = 1, .backend = "gloo"}, this_machine()); }).first;
  const auto of_unknown = refusal([] { resolve({.nprocs = 1, .backend = "glo"}, this_machine()); }).first;
  ASSERT_EQ(::unsetenv("ACCELMGR_GLOO_PLUGIN"), 0);
  EXPECT_TRUE(
      says(of_gloo, {"gloo cannot be used", "/nowhere/gloo.so: no such file", "available are serial, shm"}));
  EXPECT_TRUE(says(of_unknown, {"unknown backend 'glo'", "available are serial, shm, auto"}));
}

TEST(Machine, CanLaunchAnything) {
  const auto plan = resolve({.nprocs = 1}, this_machine());
  EXPECT_EQ(plan.nprocs, 1);
  EXPECT_FALSE(text(plan).empty());
}

}  // namespace
}  // namespace accelmgr::launch
