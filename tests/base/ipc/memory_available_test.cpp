#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "accelmgr/errors.hpp"
#include "base/ipc/memory.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::ipc::test {
namespace {

namespace fs = std::filesystem;

/// A folder with the files of /proc and /sys that other machines have; memory_available() reads them there.
class MemoryAvailableTest : public testing::Test {
 protected:
  MemoryAvailableTest() {
    put("proc/meminfo", "MemTotal:  9000 kB\nMemFree:  10 kB\nMemAvailable:    8000 kB\n");
  }

  void put(const fs::path& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  void expect(std::uint64_t available_bytes, const std::string& limited_by) {
    const auto available = memory_available(root_);
    EXPECT_EQ(available.bytes, available_bytes);
    EXPECT_NE(available.limited_by.find((root_ / limited_by).string()), std::string::npos)
        << available.limited_by;
  }

  const accelmgr::test::TemporaryFolder folder_;
  const fs::path root_ = folder_.path();
};

TEST_F(MemoryAvailableTest, IsThatOfTheMachineWithoutControlGroups) { expect(8000 * 1024, "proc/meminfo"); }

TEST_F(MemoryAvailableTest, KillsForWantOfMemoryAreThoseOfTheOwnGroup) {
  EXPECT_EQ(oom_kills(root_).counted_by, "");
  put("proc/vmstat", "nr_free_pages 5\noom_kill 7\n");
  EXPECT_EQ(oom_kills(root_).count, 7u);
  put("proc/self/cgroup", "0::/user/job\n");
  put("sys/fs/cgroup/user/memory.events", "oom 1\noom_kill 9\n");
  EXPECT_EQ(oom_kills(root_).count, 9u);
  put("sys/fs/cgroup/user/job/memory.events", "low 0\noom 3\noom_kill 2\noom_group_kill 0\n");
  EXPECT_EQ(oom_kills(root_).count, 2u);
  EXPECT_EQ(oom_kills(root_).counted_by, (root_ / "sys/fs/cgroup/user/job/memory.events").string());
  put("proc/self/cgroup", "4:memory:/job\n0::/\n");
  put("sys/fs/cgroup/memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n");
  EXPECT_EQ(oom_kills(root_).count, 1u);
}

TEST_F(MemoryAvailableTest, IsThatOfTheMachineWithoutALimit) {
  put("proc/self/cgroup", "0::/user/job\n");
  put("sys/fs/cgroup/user/job/memory.max", "max\n");
  put("sys/fs/cgroup/user/job/memory.current", "5000\n");
  expect(8000 * 1024, "proc/meminfo");
}

TEST_F(MemoryAvailableTest, IsWhatTheLimitOfAVersion2GroupLeaves) {
  put("proc/self/cgroup", "0::/user/job\n");
  put("sys/fs/cgroup/user/job/memory.max", "1000000\n");
  put("sys/fs/cgroup/user/job/memory.current", "400000\n");
  expect(600000, "sys/fs/cgroup/user/job/memory.max");
}

TEST_F(MemoryAvailableTest, IsWhatTheLimitOfAnAncestorLeaves) {
  put("proc/self/cgroup", "0::/user/job\n");
  put("sys/fs/cgroup/user/job/memory.max", "1000000\n");
  put("sys/fs/cgroup/user/job/memory.current", "400000\n");
  put("sys/fs/cgroup/user/memory.max", "1500000\n");
  put("sys/fs/cgroup/user/memory.current", "1400000\n");
  expect(100000, "sys/fs/cgroup/user/memory.max");
}

TEST_F(MemoryAvailableTest, IsWhatTheLimitOfAVersion1GroupLeaves) {
  put("proc/self/cgroup", "5:cpu,cpuacct:/other\n4:memory:/docker/0123\n0::/\n");
  put("sys/fs/cgroup/memory/docker/0123/memory.limit_in_bytes", "1000000\n");
  put("sys/fs/cgroup/memory/docker/0123/memory.usage_in_bytes", "250000\n");
  put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  put("sys/fs/cgroup/memory/memory.usage_in_bytes", "300000\n");
  expect(750000, "sys/fs/cgroup/memory/docker/0123/memory.limit_in_bytes");
}

TEST_F(MemoryAvailableTest, UsesTheMountsOwnLimitInAContainerThatDoesNotSeeItsGroup) {
  put("proc/self/cgroup", "4:memory:/docker/0123\n");
  put("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000000\n");
  put("sys/fs/cgroup/memory/memory.usage_in_bytes", "300000\n");
  expect(700000, "sys/fs/cgroup/memory/memory.limit_in_bytes");
}

TEST_F(MemoryAvailableTest, CountsFilePagesThatTheKernelDropsFirst) {
  put("proc/self/cgroup", "0::/job\n");
  put("sys/fs/cgroup/job/memory.max", "1000000\n");
  put("sys/fs/cgroup/job/memory.current", "900000\n");
  put("sys/fs/cgroup/job/memory.stat",
      "anon 100000\nfile 700000\nshmem 200000\nactive_file 1\ninactive_file 500000\n");
  expect(600000, "sys/fs/cgroup/job/memory.max");
}

TEST_F(MemoryAvailableTest, IsNothingBeyondTheLimit) {
  put("proc/self/cgroup", "0::/job\n");
  put("sys/fs/cgroup/job/memory.max", "1000\n");
  put("sys/fs/cgroup/job/memory.current", "2000\n");
  expect(0, "sys/fs/cgroup/job/memory.max");
}

TEST_F(MemoryAvailableTest, NeverReadsAGroupOutsideTheMount) {
  put("proc/self/cgroup", "0::/../../..\nnot a line of a group\n");
  expect(8000 * 1024, "proc/meminfo");
}

TEST_F(MemoryAvailableTest, UnknownIsAnError) {
  put("proc/meminfo", "MemTotal:  9000 kB\n");
  EXPECT_THROW(memory_available(root_), SessionError);
}

TEST(MemoryAvailableHere, IsSomething) {
  const auto available = memory_available();
  EXPECT_GT(available.bytes, 0U);
  EXPECT_FALSE(available.limited_by.empty());
}

}  // namespace
}  // namespace accelmgr::ipc::test
