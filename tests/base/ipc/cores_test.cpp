#include "base/ipc/cores.hpp"

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "temporary_folder.hpp"

namespace accelmgr::ipc::test {
namespace {

namespace fs = std::filesystem;

/// A folder with the files of /proc and /sys that other machines have.
class CoresTest : public testing::Test {
 protected:
  void expect_one(const std::string& text, const std::string& file) {
    const auto found = cores(root_);
    EXPECT_EQ(found.count, 1);
    EXPECT_NE(found.limit.find(text), std::string::npos) << found.limit;
    EXPECT_NE(found.limit.find((root_ / file).string()), std::string::npos) << found.limit;
  }

  const accelmgr::test::TemporaryFolder folder_;
  const fs::path root_ = folder_.path();
};

TEST_F(CoresTest, AreThoseOnWhichTheThreadMayRun) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  EXPECT_EQ(cores(root_).count, CPU_COUNT(&before));
  cpu_set_t one;
  CPU_ZERO(&one);
  for (int core = 0; core < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++core)
    if (CPU_ISSET(core, &before)) CPU_SET(core, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  const auto found = cores(root_);
  sched_setaffinity(0, sizeof before, &before);
  EXPECT_EQ(found.count, 1);
  EXPECT_EQ(found.limit, sysconf(_SC_NPROCESSORS_CONF) > 1 ? "affinity" : "the machine");
}

TEST_F(CoresTest, AreRoundedUpFromTheQuotaOfAGroup) {
  folder_.write("proc/self/cgroup", "0::/job/step\n");
  folder_.write("sys/fs/cgroup/job/step/cpu.max", "max 100000\n");
  folder_.write("sys/fs/cgroup/job/cpu.max", "50000 100000\n");
  expect_one("CPU quota of 0.5 cores", "sys/fs/cgroup/job/cpu.max");
}

TEST_F(CoresTest, HaveTheQuotaOfAContainerThatIsItsOwnRoot) {
  folder_.write("proc/self/cgroup", "0::/\n");
  folder_.write("sys/fs/cgroup/cpu.max", "100000 100000\n");
  if (cores("/").count > 1) expect_one("CPU quota of 1 cores", "sys/fs/cgroup/cpu.max");
}

TEST_F(CoresTest, HaveTheQuotaOfTheFirstVersionOfControlGroups) {
  folder_.write("proc/self/cgroup", "5:memory:/x\n4:cpu,cpuacct:/job\n");
  folder_.write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "20000\n");
  folder_.write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n");
  folder_.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  folder_.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  expect_one("CPU quota of 0.2 cores", "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us");
}

TEST_F(CoresTest, AreThoseOfTheMachineWhereFilesSayNothing) {
  folder_.write("proc/self/cgroup", "0::/job\nno line\n");
  folder_.write("sys/fs/cgroup/job/cpu.max", "what\n");
  EXPECT_EQ(cores(root_).count, cores(root_ / "nowhere").count);
}

TEST(OpenmpThreads, AreThoseOfTheEnvironment) {
  for (const auto& [text, threads] :
       {std::pair{"4", 4}, std::pair{"3,2", 3}, std::pair{"0", 0}, std::pair{"x", 0}}) {
    setenv("OMP_NUM_THREADS", text, 1);
    EXPECT_EQ(openmp_threads().value_or(0), threads) << text;
  }
  unsetenv("OMP_NUM_THREADS");
}

}  // namespace
}  // namespace accelmgr::ipc::test
