#include <gtest/gtest.h>

#include <filesystem>

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
    folder_.write("proc/meminfo", "MemTotal:  9000 kB\nMemFree:  10 kB\nMemAvailable:    8000 kB\n");
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
  folder_.write("proc/vmstat", "nr_free_pages 5\noom_kill 7\n");
  EXPECT_EQ(oom_kills(root_).count, 7u);
  folder_.write("proc/self/cgroup", "0::/user/job\n");
  folder_.write("sys/fs/cgroup/user/memory.events", "oom 1\noom_kill 9\n");
  EXPECT_EQ(oom_kills(root_).count, 9u);
  folder_.write("sys/fs/cgroup/user/job/memory.events", "low 0\noom 3\noom_kill 2\noom_group_kill 0\n");
  EXPECT_EQ(oom_kills(root_).count, 2u);
  EXPECT_EQ(oom_kills(root_).counted_by, (root_ / "sys/fs/cgroup/user/job/memory.events").string());
  folder_.write("proc/self/cgroup", "4:memory:/job\n0::/\n");
  folder_.write("sys/fs/cgroup/memory/job/memory.oom_control",
                "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n");
  EXPECT_EQ(oom_kills(root_).count, 1u);
}

TEST_F(MemoryAvailableTest, IsWhatTheLimitOfAVersion2GroupOrOfAnAncestorLeaves) {
  folder_.write("proc/self/cgroup", "0::/user/job\n");
  folder_.write("sys/fs/cgroup/user/job/memory.max", "max\n");
  folder_.write("sys/fs/cgroup/user/job/memory.current", "900000\n");
  expect(8000 * 1024, "proc/meminfo");
  folder_.write("sys/fs/cgroup/user/job/memory.max", "1000000\n");
  expect(100000, "sys/fs/cgroup/user/job/memory.max");
  // The kernel drops pages of files first.
  folder_.write("sys/fs/cgroup/user/job/memory.stat",
                "anon 100000\nfile 700000\nshmem 200000\nactive_file 1\ninactive_file 500000\n");
  expect(600000, "sys/fs/cgroup/user/job/memory.max");
  folder_.write("sys/fs/cgroup/user/memory.max", "1500000\n");
  folder_.write("sys/fs/cgroup/user/memory.current", "1400000\n");
  expect(100000, "sys/fs/cgroup/user/memory.max");
}

TEST_F(MemoryAvailableTest, IsWhatTheLimitOfAVersion1GroupLeaves) {
  folder_.write("proc/self/cgroup", "5:cpu,cpuacct:/other\n4:memory:/docker/0123\n0::/\n");
  folder_.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000000\n");
  folder_.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "300000\n");
  // A container that does not see its group has the limit of the mount.
  expect(700000, "sys/fs/cgroup/memory/memory.limit_in_bytes");
  folder_.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  folder_.write("sys/fs/cgroup/memory/docker/0123/memory.limit_in_bytes", "1000000\n");
  folder_.write("sys/fs/cgroup/memory/docker/0123/memory.usage_in_bytes", "250000\n");
  expect(750000, "sys/fs/cgroup/memory/docker/0123/memory.limit_in_bytes");
}

TEST_F(MemoryAvailableTest, IsNothingBeyondTheLimit) {
  folder_.write("proc/self/cgroup", "0::/job\n");
  folder_.write("sys/fs/cgroup/job/memory.max", "1000\n");
  folder_.write("sys/fs/cgroup/job/memory.current", "2000\n");
  expect(0, "sys/fs/cgroup/job/memory.max");
}

TEST_F(MemoryAvailableTest, NeverReadsAGroupOutsideTheMount) {
  folder_.write("proc/self/cgroup", "0::/../../..\nnot a line of a group\n");
  expect(8000 * 1024, "proc/meminfo");
}

TEST_F(MemoryAvailableTest, UnknownIsAnError) {
  folder_.write("proc/meminfo", "MemTotal:  9000 kB\n");
  EXPECT_THROW(memory_available(root_), SessionError);
}

}  // namespace
}  // namespace accelmgr::ipc::test
