#include "launcher/collective/shm/liveness.hpp"

#include <gtest/gtest.h>

#include "base/ipc/processes.hpp"

namespace accelmgr::collective::shm {
namespace {

ipc::Child sleeping_child() {
  return ipc::test::fork_child([] {
    ipc::test::hang();
    return 0;
  });
}

TEST(Liveness, KnowsWhenAProcessHasEnded) {
  const auto child = sleeping_child();
  const auto identity = identity_of(child.pid);
  Liveness liveness;
  EXPECT_FALSE(liveness.has_ended(identity));
  kill(child.pid, SIGKILL);
  EXPECT_EQ(ipc::test::end_of(child), "killed by signal 9 (KILL)");
  EXPECT_TRUE(liveness.has_ended(identity));
  EXPECT_TRUE(Liveness().has_ended(identity));
}

TEST(Liveness, IsNotDeceivedByAnotherProcessWithThePid) {
  const auto child = sleeping_child();
  const auto alive = identity_of(child.pid);
  ASSERT_NE(alive, 0u);
  const Identity reused = alive ^ (Identity{1} << 32);  // The same pid with another start time.
  EXPECT_FALSE(Liveness().has_ended(alive));
  EXPECT_TRUE(Liveness().has_ended(reused));
  kill(child.pid, SIGKILL);
  ipc::test::end_of(child);
}

TEST(Liveness, FindsThisProcessAndNobodyAlive) {
  EXPECT_FALSE(Liveness().has_ended(identity_of(getpid())));
  EXPECT_FALSE(Liveness().has_ended(0));
}

TEST(Liveness, TellsAProcessAlwaysTheSame) {
  const auto before = identity_of(getpid());
  const std::vector<char> more(10'000'000, 1);  // Changes other fields of /proc/PID/stat.
  EXPECT_EQ(identity_of(getpid()), before);
  EXPECT_EQ(pid_of(before), getpid());
}

}  // namespace
}  // namespace accelmgr::collective::shm
