#include "base/ipc/leftovers.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <unistd.h>

#include "base/ipc/process.hpp"
#include "base/ipc/socket.hpp"
#include "base/ipc/user_forks.hpp"
#include "processes.hpp"

namespace accelmgr::ipc::test {
namespace {

TEST(EndGroupMembers, EndsAllButTheLeader) {
  auto [ours, theirs] = socket_pair();
  const auto leader = fork_child([socket = theirs.get()] {
    setpgid(0, 0);
    if (fork() == 0) hang();
    if (fork() == 0) {
      signal(SIGTERM, SIG_IGN);
      send(socket, "ignores TERM");
      raise(SIGSTOP);
      hang();
    }
    receive(socket, soon());  // Until both have been forked.
    const bool ended = end_group_members(getpid(), base::Deadline::in_seconds(0.02));
    return ended && waitpid(-1, nullptr, 0) > 0 && waitpid(-1, nullptr, 0) > 0 ? 0 : 1;
  });
  EXPECT_EQ(receive(ours.get(), soon()).value().bytes, "ignores TERM");
  send(ours.get(), "go on");
  EXPECT_EQ(end_of(leader), "exit code 0");
}

TEST(EndGroupMembers, EndsWhatALeaderThatWasReapedLeftBehind) {
  auto [ours, theirs] = socket_pair();
  const auto leader = fork_child([] {
    setpgid(0, 0);
    if (fork() == 0) hang();
    return 0;
  });
  theirs.reset();
  EXPECT_EQ(end_of(leader), "exit code 0");
  EXPECT_FALSE(is_closed(ours.get())) << "the other process of the group should still be there";
  EXPECT_TRUE(end_group_members(leader.pid, soon()));
  EXPECT_FALSE(receive(ours.get(), soon()));
}

TEST(EndMarked, EndsWhatAKilledProcessHasForkedAndExecuted) {
  auto [ours, theirs] = socket_pair();
  const auto marked = fork_child([socket = theirs.get()] {
    mark_descendants();
    if (fork() == 0) hang();
    pid_t executed = 0;
    char program[] = "sleep", seconds[] = "60";
    char* const arguments[] = {program, seconds, nullptr};
    char* const nothing[] = {nullptr};
    fcntl(socket, F_SETFD, 0);
    for (char* const* environment : {environ, const_cast<char**>(nothing)})
      if (posix_spawnp(&executed, program, nullptr, nullptr, arguments, environment) != 0) return 1;
    send(socket, own_mark());
    hang();
  });
  theirs.reset();
  const auto mark = receive(ours.get(), soon()).value().bytes;
  send_signal(marked.pidfd.get(), SIGKILL);
  ASSERT_EQ(end_of(marked), "killed by signal 9 (KILL)");
  EXPECT_FALSE(is_closed(ours.get())) << "what it has begun should still be there";
  const auto other = fork_child([] {
    hang();
    return 0;
  });
  const auto ends = fork_child([&mark] { return end_marked(mark, soon()) ? 0 : 1; });
  EXPECT_EQ(end_of(ends), "exit code 0");
  EXPECT_FALSE(receive(ours.get(), soon()));
  EXPECT_FALSE(has_ended(other.pidfd.get()));
  send_signal(other.pidfd.get(), SIGKILL);
  EXPECT_EQ(end_of(other), "killed by signal 9 (KILL)");
  expect_no_process_left();
}

TEST(CloseInForks, ClosesADescriptorInChildrenUntilItIsKept) {
  const auto is_open_in_child = [](int fd) {
    return end_of(fork_child([fd] { return fcntl(fd, F_GETFD) >= 0 ? 0 : 1; })) == "exit code 0";
  };
  auto [one, two] = socket_pair();
  close_in_forks(one.get());
  EXPECT_FALSE(is_open_in_child(one.get()));
  EXPECT_TRUE(is_open_in_child(two.get()));
  EXPECT_GE(fcntl(one.get(), F_GETFD), 0);
  keep_in_forks(one.get());
  EXPECT_TRUE(is_open_in_child(one.get()));
}

}  // namespace
}  // namespace accelmgr::ipc::test
