// Checks that a failed write says where and why, and does not change the directory.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>

#include "base/ipc/processes.hpp"
#include "engine/checkpoint/checkpoint.hpp"
#include "support.hpp"

namespace accelmgr::checkpoint::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int skipped = 77;

/// Mounts a tmpfs at `path` that only this process sees. Returns false if the kernel refuses.
bool mount_small_disk(const fs::path& path, const std::string& size) {
  const auto uid = std::to_string(geteuid()), gid = std::to_string(getegid());
  if (unshare(CLONE_NEWNS) != 0) {
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
    write_text("/proc/self/setgroups", "deny");
    write_text("/proc/self/uid_map", "0 " + uid + " 1");
    write_text("/proc/self/gid_map", "0 " + gid + " 1");
  }
  return mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("tmpfs", path.c_str(), "tmpfs", 0, ("size=" + size).c_str()) == 0;
}

class FailedWrite : public ::testing::Test {
 protected:
  std::string refusal_of(const Contents& contents) {
    return message_of<CheckpointError>([&] { write(directory_.path(), contents, 1); });
  }
  void expect_only(std::uint64_t step) {
    EXPECT_EQ(names_in(directory_.path()).size(), 1u);
    EXPECT_EQ(open_latest(directory_.path(), {}).step, step);
  }

  const TemporaryFolder directory_;
};

// Writes ever larger checkpoints and keeps one. Some fit on the disk; others fill it in one of their files.
TEST_F(FailedWrite, ForWantOfSpaceLeavesThePreviousOne) {
  const auto child = ipc::test::fork_child([&] {
    if (!mount_small_disk(directory_.path(), "256k")) return skipped;
    write_sample(directory_.path(), 1);
    std::uint64_t good = 1;
    std::set<std::string> files;
    for (std::uint64_t step = 2; step < 50; ++step) {
      const Sample sample(step, {}, 0, step * 1024);
      try {
        write(directory_.path(), sample.contents(), 1);
        good = step;
      } catch (const CheckpointError& error) {
        const std::string text = error.what();
        EXPECT_THAT(text, AllOf(HasSubstr(".step-000000"), HasSubstr("No space left on device (errno 28)")));
        for (const auto* file : {"model.safetensors", "training.safetensors"})
          if (text.find(file) != std::string::npos) files.insert(file);
      }
      expect_only(good);
    }
    EXPECT_GT(good, 2u);
    EXPECT_EQ(files.size(), 2u) << "the disk was full at each of the large files";
    const Sample replacing(good, {}, 9, 60 * 1024);
    EXPECT_THAT(refusal_of(replacing.contents()), HasSubstr("No space left on device"));
    EXPECT_TRUE(is_sample(open_latest(directory_.path(), {}), good));
    return exit_code();
  });
  const auto end = ipc::test::end_of(child);
  if (end == fmt::format("exit code {}", skipped))
    GTEST_SKIP() << "this kernel lets nobody mount a disk of his own";
  EXPECT_EQ(end, "exit code 0");
}

TEST_F(FailedWrite, BeyondTheLimitOfFileSizesLeavesThePreviousOne) {
  write_sample(directory_.path(), 1);
  const auto child = ipc::test::fork_child([&] {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{8192, 8192};
    setrlimit(RLIMIT_FSIZE, &limit);
    for (const std::uint64_t step : {1, 2}) {
      EXPECT_THAT(
          refusal_of(Sample(step, {}, 0, 4096).contents()),
          AllOf(HasSubstr("model.safetensors', at byte 8192 of "), HasSubstr("File too large (errno 27)")));
      expect_only(1);
    }
    return exit_code();
  });
  EXPECT_EQ(ipc::test::end_of(child), "exit code 0");
  EXPECT_TRUE(is_sample(open_latest(directory_.path(), {}), 1));
}

TEST_F(FailedWrite, ToAReadOnlyDirectorySaysSo) {
  write_sample(directory_.path(), 1);
  fs::permissions(directory_.path(), fs::perms(0555));
  const auto child = ipc::test::fork_child([&] {
    become_unprivileged();
    for (const std::uint64_t step : {1, 2}) {
      EXPECT_THAT(refusal_of(Sample(step).contents()),
                  AllOf(HasSubstr(directory_.path().string()), HasSubstr("Permission denied (errno 13)")));
    }
    EXPECT_THAT(message_of<CheckpointError>([&] { write_sample(directory_ / "new" / "er", 1); }),
                AllOf(HasSubstr("making the directory '" + (directory_ / "new").string()),
                      HasSubstr("Permission denied")));
    expect_only(1);
    return exit_code();
  });
  EXPECT_EQ(ipc::test::end_of(child), "exit code 0");
  fs::permissions(directory_.path(), fs::perms::owner_all);
}

TEST_F(FailedWrite, WhereSomethingElseHasTheNameSaysSo) {
  write_text(directory_ / "file", "mine");
  for (const auto& path : {directory_ / "file", directory_ / "file" / "below"})
    EXPECT_THAT(message_of<CheckpointError>([&] { write_sample(path, 1); }),
                AllOf(HasSubstr(path.string() + "'"), HasSubstr("Not a directory")));
  write_text(directory_ / "step-00000001", "mine");
  EXPECT_THAT(refusal_of(Sample(1).contents()),
              HasSubstr("step-00000001' is in the way: it is not a directory"));
  EXPECT_EQ(names_in(directory_.path()), (Names{"file", "step-00000001"}));
  EXPECT_EQ(read_text(directory_ / "step-00000001"), "mine");
}

TEST_F(FailedWrite, WithoutANameIsAnError) { EXPECT_THROW(write_sample("", 1), CheckpointError); }

}  // namespace
}  // namespace accelmgr::checkpoint::test
