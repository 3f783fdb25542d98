// The Spawner: programs, descriptors, slots.
#include "launch/spawner.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "functions.hpp"
#include "launched.hpp"

namespace accelmgr::launch::test {
namespace {

class Programs : public Launched, public testing::WithParamInterface<bool> {
 protected:
  static Spawner spawner() { return GetParam() ? Spawner::execute() : Spawner::fork(); }
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
  static std::string read_all(int fd) {
    std::string text;
    char bytes[4096];
    for (ssize_t got; (got = read(fd, bytes, sizeof bytes)) > 0;)
      text.append(bytes, static_cast<std::size_t>(got));
    return text;
  }
};

TEST_P(Programs, HaveTheirEnvironmentAndTheDescriptorsTheyAreGivenAndNoOthers) {
  int output[2], extra[2];
  ASSERT_EQ(pipe2(output, O_CLOEXEC), 0);
  ASSERT_EQ(pipe2(extra, O_CLOEXEC), 0);
  const base::UniqueFd open_here(dup(0));  // Without close-on-exec.
  {
    auto launcher = spawner();
    const std::pair<int, int> fds[] = {{output[1], 1}, {extra[1], 9}};
    const auto report = launcher.start(
        0, task({"sh", "-c", "echo $WHO $RANK; echo nine >&9; cd /proc/self/fd; echo *"}), fds);
    close(output[1]);
    close(extra[1]);
    EXPECT_EQ(next_end(launcher), "exit code 0");
    EXPECT_FALSE(read_report(report.get()));
  }
  // sh opens the folder to list it: a number more, gone before it writes.
  const auto text = read_all(output[0]);
  EXPECT_TRUE(text.starts_with("me\n0 1 2 ")) << text;
  EXPECT_NE(text.find(" 9"), std::string::npos) << text;
  EXPECT_EQ(read_all(extra[0]), "nine\n");
  close(output[0]);
  close(extra[0]);
}

TEST_P(Programs, ThatAreNotThereAreReportedAsAShellDoes) {
  auto launcher = spawner();
  const auto report = launcher.start(0, task({"no-such-program-anywhere"}));
  EXPECT_EQ(next_end(launcher), "exit code 127");
  const auto told = read_report(report.get());
  ASSERT_TRUE(told && told->failure);
  EXPECT_EQ(told->failure->rank, 3);
  EXPECT_EQ(told->failure->phase, "start");
  EXPECT_NE(told->failure->what.find("no-such-program-anywhere"), std::string::npos);
  const auto folder = launcher.start(1, task({"/proc"}));
  EXPECT_EQ(next_end(launcher), "exit code 126");
}

TEST_P(Programs, AreSentSignalsInTheirGroupsAndReplaced) {
  auto launcher = spawner();
  for (int i = 0; i < 3; ++i) {
    const auto report = launcher.start(7, task({"sleep", "60"}));
    const auto started = std::get<ipc::Started>(launcher.next(soon()).value());
    EXPECT_EQ(started.rank, 7);
    launcher.signal(SIGINT);
    EXPECT_EQ(next_end(launcher), "killed by signal 2 (INT)");
  }
}

TEST_P(Programs, StartWithDefaultSignals) {
  signal(SIGUSR1, SIG_IGN);
  signal(SIGPIPE, SIG_IGN);
  auto launcher = spawner();
  const auto report = launcher.start(0, task({"sh", "-c", "kill -USR1 $$; sleep 60"}));
  EXPECT_EQ(next_end(launcher), "killed by signal 10 (USR1)");
  signal(SIGUSR1, SIG_DFL);
  signal(SIGPIPE, SIG_DFL);
}

TEST_P(Programs, TheEndOfTheLauncherIsTold) {
  auto launcher = spawner();
  const auto report = launcher.start(0, task({"sleep", "60"}));
  const auto started = std::get<ipc::Started>(launcher.next(soon()).value());
  ipc::send_signal(launcher.pidfd(), SIGKILL);
  EXPECT_FALSE(launcher.next(soon()));
  EXPECT_TRUE(launcher.launcher_end());
  EXPECT_TRUE(ipc::has_ended(started.pidfd.get()));
  const auto message = message_of<SessionError>([&] { launcher.start(1, task({"true"})); });
  EXPECT_NE(message.find("rank 3 cannot be started: the launcher, which would be its parent, was"),
            std::string::npos)
      << message;
}

INSTANTIATE_TEST_SUITE_P(Launchers, Programs, testing::Bool(),
                         [](const auto& info) { return info.param ? "executed" : "forked"; });

}  // namespace
}  // namespace accelmgr::launch::test
