#include "launcher/collective/shm/liveness.hpp"

#include <gtest/gtest.h>

#include "worlds.hpp"

namespace accelmgr::collective::shm {
namespace {

TEST(Liveness, KnowsWhenAProcessHasEnded) {
  test::Shared<std::atomic<int>> go;
  test::Processes processes;
  test::Shared<std::atomic<std::uint64_t>> identity;
  processes.start([&] {
    identity->store(identity_of(getpid()));
    go->store(1);
    test::wait_for(*go, 2);
  });
  test::wait_for(*go);
  Liveness liveness;
  EXPECT_FALSE(liveness.has_ended(*identity));
  go->store(2);
  EXPECT_EQ(processes.end_of(0), "exit code 0");
  EXPECT_TRUE(liveness.has_ended(*identity));
  EXPECT_TRUE(Liveness().has_ended(*identity));
}

TEST(Liveness, IsNotDeceivedByAnotherProcessWithThePid) {
  test::Processes processes;
  processes.start([] { pause(); });
  test::Shared<std::atomic<int>> pid;
  processes.start([&] {
    pid->store(getpid());
    pause();
  });
  test::wait_for(*pid);
  const auto alive = identity_of(pid->load());
  ASSERT_NE(alive, 0u);
  const Identity reused = alive ^ (Identity{1} << 32);  // The same pid with another start time.
  EXPECT_FALSE(Liveness().has_ended(alive));
  EXPECT_TRUE(Liveness().has_ended(reused));
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
