// Tests of DirectoryLock and of run ids. One run at a time writes to a directory, and the next run learns
// which run was killed there.
#include "engine/checkpoint/lock.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <thread>

#include "base/ipc/processes.hpp"
#include "engine/checkpoint/run_id.hpp"
#include "support.hpp"

namespace accelmgr::checkpoint::test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;

class Lock : public ::testing::Test {
 protected:
  std::string refusal(const fs::path& path) {
    return message_of<CheckpointError>([&] { DirectoryLock lock(path); });
  }
  /// Forks a process that holds the lock for `run` until it is killed.
  ipc::Child holder(const std::string& run) {
    int ready[2];
    EXPECT_EQ(pipe2(ready, O_CLOEXEC), 0);
    base::UniqueFd out(ready[0]), in(ready[1]);
    auto child = ipc::test::fork_child([&]() -> int {
      DirectoryLock lock(directory_.path());
      lock.set_run(run);
      if (::write(in.get(), "!", 1) != 1) return 1;
      ipc::test::hang();
    });
    char byte;
    EXPECT_EQ(read(out.get(), &byte, 1), 1);
    return child;
  }
  void kill_and_reap(const ipc::Child& child) {
    ipc::send_signal(child.pidfd.get(), SIGKILL);
    EXPECT_EQ(ipc::test::end_of(child), "killed by signal 9 (KILL)");
  }

  const TemporaryFolder directory_;
};

TEST_F(Lock, IsHeldByOneAndLeavesNothing) {
  const auto path = directory_ / "made" / "for" / "it";
  {
    DirectoryLock lock(path);
    EXPECT_EQ(names_in(path), Names{".lock"});
    EXPECT_THAT(refusal(path), AllOf(HasSubstr("for/it' is in use by another manager of this process"),
                                     HasSubstr("one run at a time")));
  }
  EXPECT_THAT(names_in(path), IsEmpty());
  EXPECT_EQ(DirectoryLock(path).killed_run(), "");
}

TEST_F(Lock, OfAnotherProcessIsRefusedWithItsIdUntilItIsKilled) {
  const auto child = holder("00000000000000aa");
  EXPECT_THAT(refusal(directory_.path()), HasSubstr(fmt::format("is in use by process {}: ", child.pid)));
  kill_and_reap(child);
  {
    DirectoryLock lock(directory_.path());
    EXPECT_EQ(lock.killed_run(), "00000000000000aa");
    lock.set_run("00000000000000bb");
  }
  EXPECT_EQ(DirectoryLock(directory_.path()).killed_run(), "");
}

TEST_F(Lock, OfAKilledRunIsKnownThroughFurtherOnes) {
  kill_and_reap(holder("00000000000000aa"));
  const auto child = ipc::test::fork_child([&] {
    DirectoryLock lock(directory_.path());
    raise(SIGKILL);  // Before it calls set_run().
    return 0;
  });
  EXPECT_EQ(ipc::test::end_of(child), "killed by signal 9 (KILL)");
  EXPECT_EQ(DirectoryLock(directory_.path()).killed_run(), "00000000000000aa");
}

TEST_F(Lock, IsWaitedForWhileAWriterOfAKilledRunEnds) {
  int ready[2], go_on[2];
  ASSERT_EQ(pipe2(ready, O_CLOEXEC), 0);
  ASSERT_EQ(pipe2(go_on, O_CLOEXEC), 0);
  const base::UniqueFd ready_out(ready[0]), ready_in(ready[1]), go_on_out(go_on[0]);
  base::UniqueFd go_on_in(go_on[1]);
  const auto run = ipc::test::fork_child([&]() -> int {
    DirectoryLock lock(directory_.path());
    if (fork() == 0) {  // A writer of the run: it inherits the lock's descriptor.
      go_on_in.reset();
      char byte;
      _exit(::write(ready_in.get(), "!", 1) == 1 && read(go_on_out.get(), &byte, 1) == 0 ? 0 : 1);
    }
    ipc::test::hang();
  });
  char byte;
  ASSERT_EQ(read(ready_out.get(), &byte, 1), 1);
  kill_and_reap(run);
  std::thread writer([&] { go_on_in.reset(); });
  EXPECT_NO_THROW(DirectoryLock{directory_.path()});
  writer.join();
}

TEST_F(Lock, IsNotGivenBackByAForkedChild) {
  std::optional<DirectoryLock> lock(std::in_place, directory_.path());
  const auto child = ipc::test::fork_child([&] {
    lock.reset();
    return 0;
  });
  EXPECT_EQ(ipc::test::end_of(child), "exit code 0");
  EXPECT_EQ(names_in(directory_.path()), Names{".lock"});
  EXPECT_THAT(refusal(directory_.path()), HasSubstr("is in use"));
}

TEST_F(Lock, OfADirectoryThatCannotBeWrittenIsRefusedWithTheReason) {
  write_text(directory_ / "file", "");
  EXPECT_THAT(refusal(directory_ / "file"),
              AllOf(HasSubstr("cannot be written to '"), HasSubstr("Not a directory")));
  fs::permissions(directory_.path(), fs::perms::owner_read | fs::perms::owner_exec | fs::perms::others_exec);
  const auto child = ipc::test::fork_child([&] {
    become_unprivileged();
    EXPECT_THAT(refusal(directory_.path()), HasSubstr("Permission denied"));
    EXPECT_THAT(refusal(directory_ / "below"), HasSubstr("Permission denied"));
    return exit_code();
  });
  EXPECT_EQ(ipc::test::end_of(child), "exit code 0");
  fs::permissions(directory_.path(), fs::perms::owner_all);
}

TEST(RunId, IsNewEachTime) {
  EXPECT_THAT(new_run_id(), MatchesRegex("[0-9a-f]{16}"));
  EXPECT_NE(new_run_id(), new_run_id());
}

TEST(RunId, TellsTheCheckpointsOfOthers) {
  const TemporaryFolder directory;
  const auto write_of = [&](std::uint64_t step, const nlohmann::json& state) {
    const auto image = image_of("weight", {1});
    write(directory.path(), {step, {}, image, image, state}, 100);
  };
  write_of(1, {{run_id_key, "ours"}});
  write_of(2, {{run_id_key, "another"}});
  write_of(3, nlohmann::json::object());  // As an earlier version wrote it: it has no run id.
  write_of(4, {{run_id_key, "another"}});
  write_text(directory / "step-00000004" / "state.json", "damaged");
  const auto others = checkpoints_of_other_runs(directory.path(), "ours");
  std::vector<std::uint64_t> steps;
  for (const auto& other : others) steps.push_back(other.step);
  EXPECT_THAT(steps, ElementsAre(3, 2));
}

}  // namespace
}  // namespace accelmgr::checkpoint::test
