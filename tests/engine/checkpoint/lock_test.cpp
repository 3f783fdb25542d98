// Tests of DirectoryLock and of run ids. One run at a time writes to a directory, and the next run learns
// which run was killed there.
#include "engine/checkpoint/lock.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <signal.h>

#include <thread>

#include "base/ipc/processes.hpp"
#include "base/ipc/socket.hpp"
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
    auto [ours, theirs] = ipc::socket_pair();
    auto child = ipc::test::fork_child([&, socket = theirs.get()]() -> int {
      DirectoryLock lock(directory_.path());
      lock.set_run(run);
      ipc::send(socket, "holds it");
      ipc::test::hang();
    });
    EXPECT_TRUE(ipc::receive(ours.get(), ipc::test::soon()));
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
  auto [ours, theirs] = ipc::socket_pair();
  const auto run = ipc::test::fork_child([&, &ours = ours, &theirs = theirs]() -> int {
    DirectoryLock lock(directory_.path());
    if (fork() == 0) {  // A writer of the run: it inherits the lock's descriptor.
      ours.reset();
      ipc::send(theirs.get(), "writes");
      _exit(ipc::receive(theirs.get(), ipc::test::soon()) ? 1 : 0);
    }
    ipc::test::hang();
  });
  ASSERT_TRUE(ipc::receive(ours.get(), ipc::test::soon()));
  kill_and_reap(run);
  std::thread writer([&ours = ours] { ours.reset(); });
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
