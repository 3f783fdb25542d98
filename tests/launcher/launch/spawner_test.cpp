// Tests of the Spawner: programs that it executes, their descriptors and their slots.
#include "launcher/launch/run/spawner.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include "functions.hpp"
#include "launched.hpp"

namespace accelmgr::launch::test {
namespace {

class Programs : public Launched, public testing::WithParamInterface<bool> {
 protected:
  static Spawner spawner() { return GetParam() ? Spawner::from_zygote() : Spawner::fork(); }
  static Task task(std::vector<std::string> program) {
    return {.rank = 3,
            .environment = {{"PATH", "/usr/bin:/bin"}, {"WHO", "me"}},
            .program = std::move(program),
            .call = {},
            .execute_self = false};
  }
  static std::string next_end(Spawner& spawner) {
    for (;;) {
      const auto event = spawner.next(soon());
      if (!event) return "no event";
      if (const auto* ended = std::get_if<ipc::Ended>(&*event)) return ipc::describe_exit(ended->wait_status);
    }
  }
  static std::string text_of(const base::UniqueFd& file) {
    return ipc::read_proc("/proc/self/fd/" + std::to_string(file.get())).value_or("");
  }
};

TEST_P(Programs, HaveTheirEnvironmentAndTheDescriptorsTheyAreGivenAndNoOthers) {
  const base::UniqueFd output(memfd_create("output", MFD_CLOEXEC)), extra(memfd_create("extra", MFD_CLOEXEC));
  const base::UniqueFd open_here(dup(0));  // Opened without close-on-exec.
  auto fork_server = spawner();
  const std::pair<int, int> fds[] = {{output.get(), 1}, {extra.get(), 9}};
  const auto report = fork_server.start(
      0, task({"sh", "-c", "echo $WHO $RANK; echo nine >&9; cd /proc/self/fd; echo *"}), fds);
  EXPECT_EQ(next_end(fork_server), "exit code 0");
  EXPECT_FALSE(read_report(report.get()));
  // sh opens the folder to list it. So there may be one more number, of a descriptor that is closed before sh
  // writes.
  const auto text = text_of(output);
  EXPECT_TRUE(text.starts_with("me\n0 1 2 ")) << text;
  EXPECT_TRUE(says(text, {" 9"}));
  EXPECT_EQ(text_of(extra), "nine\n");
}

TEST_P(Programs, ThatAreNotThereAreReportedAsAShellDoes) {
  auto fork_server = spawner();
  const auto report = fork_server.start(0, task({"no-such-program-anywhere"}));
  EXPECT_EQ(next_end(fork_server), "exit code 127");
  const auto told = read_report(report.get());
  ASSERT_TRUE(told && told->failure);
  EXPECT_EQ(told->failure->rank, 3);
  EXPECT_EQ(told->failure->phase, "start");
  EXPECT_TRUE(says(told->failure->what, {"no-such-program-anywhere"}));
  const auto folder = fork_server.start(1, task({"/proc"}));
  EXPECT_EQ(next_end(fork_server), "exit code 126");
}

TEST_P(Programs, StartWithDefaultSignals) {
  signal(SIGUSR1, SIG_IGN);
  signal(SIGPIPE, SIG_IGN);
  auto fork_server = spawner();
  const auto report = fork_server.start(0, task({"sh", "-c", "kill -USR1 $$; sleep 60"}));
  EXPECT_EQ(next_end(fork_server), "killed by signal 10 (USR1)");
  signal(SIGUSR1, SIG_DFL);
  signal(SIGPIPE, SIG_DFL);
}

TEST_P(Programs, AreNotStartedByAForkServerThatHasEnded) {
  auto fork_server = spawner();
  ipc::send_signal(fork_server.pidfd(), SIGKILL);
  EXPECT_FALSE(fork_server.next(soon()));
  EXPECT_TRUE(fork_server.fork_server_end());
  EXPECT_TRUE(says(message_of<SessionError>([&] { fork_server.start(1, task({"true"})); }),
                   {"rank 3 cannot be started: the fork server, its parent, has ended:"}));
}

INSTANTIATE_TEST_SUITE_P(ForkServers, Programs, testing::Bool(),
                         [](const auto& info) { return info.param ? "executed" : "forked"; });

}  // namespace
}  // namespace accelmgr::launch::test
