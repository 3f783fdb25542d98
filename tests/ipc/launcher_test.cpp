#include "ipc/launcher.hpp"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <future>
#include <optional>
#include <stdexcept>
#include <thread>

#include "accelmgr/errors.hpp"
#include "ipc/proc_file.hpp"
#include "ipc/socket.hpp"
#include "ipc/wait_ready.hpp"
#include "processes.hpp"
#include "roles.hpp"
#include "system_call.hpp"

namespace accelmgr::ipc::test {
namespace {

/// A child obeys the words that come over the socket passed to it.
int obey(SpawnRequest request) {
  if (request.fds.size() != 1) return 100;
  const int socket = request.fds[0].get();
  while (const auto order = receive(socket, soon())) {
    const auto& word = order->bytes;
    if (word == "rank") send(socket, std::to_string(request.rank));
    if (word == "generation") send(socket, std::to_string(request.generation));
    if (word == "descriptors") send(socket, open_descriptors());
    if (word == "group") send(socket, getpgrp() == getpid() ? "own" : "another's");
    if (word == "core") {
      rlimit limit{};
      getrlimit(RLIMIT_CORE, &limit);
      send(socket, limit.rlim_cur <= 1 ? "off" : "on");
    }
    if (word == "throw") throw std::runtime_error("as ordered");
    if (word == "exit 3") return 3;
    if (word == "ignore TERM") {
      signal(SIGTERM, SIG_IGN);
      send(socket, "ignored");
    }
    if (word == "have a child") {
      if (fork() == 0) hang();
      send(socket, "born");
    }
  }
  return 0;
}

struct Runner {
  Started started;
  base::UniqueFd socket;

  std::string ask(std::string_view word) const {
    send(socket.get(), word);
    return receive(socket.get(), soon()).value().bytes;
  }
  bool ended() const { return wait_ended(started.pidfd.get(), soon()); }
};

/// Skips the test where a sanitizer has a thread of its own: the launcher is forked from processes of one
/// thread alone.
class LauncherTest : public testing::Test {
 protected:
  void SetUp() override {
#if defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "the thread sanitizer starts a thread of its own, at the latest in a forked process";
#endif
    descriptors_before_ = open_descriptors();
    launcher_.emplace(LauncherClient::start(obey));
  }
  void TearDown() override {
    launcher_.reset();
    expect_no_process_left();
  }

  Runner spawn(int rank, std::uint32_t generation = 1) {
    auto [ours, theirs] = socket_pair();
    const int fd = theirs.get();
    launcher_->spawn(rank, generation, {&fd, 1});
    return {std::get<Started>(launcher_->next(soon()).value()), std::move(ours)};
  }
  Ended next_end() { return std::get<Ended>(launcher_->next(soon()).value()); }

  std::string descriptors_before_;
  std::optional<LauncherClient> launcher_;
};

std::string comm(pid_t pid) { return read_proc("/proc/" + std::to_string(pid) + "/comm").value_or(""); }

TEST_F(LauncherTest, ChildrenGetTheirRequest) {
  const auto first = spawn(0, 1);
  const auto second = spawn(23, 7);
  EXPECT_EQ(first.started.rank, 0);
  EXPECT_EQ(second.started.rank, 23);
  EXPECT_EQ(second.started.generation, 7U);
  EXPECT_EQ(first.ask("rank"), "0");
  EXPECT_EQ(second.ask("rank"), "23");
  EXPECT_EQ(second.ask("generation"), "7");
}

TEST_F(LauncherTest, ProcessesAreNamed) {
  const auto runner = spawn(23);
  EXPECT_EQ(runner.ask("rank"), "23");  // Its name is set by now, and the launcher's long ago.
  EXPECT_EQ(comm(runner.started.pid), "accelmgr:run23\n");
  EXPECT_EQ(comm(launcher_->pid()), "accelmgr:launch\n");
}

TEST_F(LauncherTest, ChildrenHaveGroupsOfTheirOwnAndNoCoreDumps) {
  const auto runner = spawn(0);
  EXPECT_EQ(runner.ask("group"), "own");
  EXPECT_EQ(runner.ask("core"), "off");
  EXPECT_NE(getpgid(launcher_->pid()), getpgrp());
}

TEST_F(LauncherTest, ChildrenHoldNoDescriptorsOfTheLauncherOrOfEachOther) {
  const auto count = [](const std::string& list) { return std::count(list.begin(), list.end(), ' ') + 1; };
  const auto inherited_and_passed = count(descriptors_before_) + 1;
  std::vector<Runner> runners;
  for (int rank = 0; rank < 3; ++rank) {
    runners.push_back(spawn(rank));
    EXPECT_EQ(count(runners.back().ask("descriptors")), inherited_and_passed);
  }
}

TEST_F(LauncherTest, ExitCodesAreReported) {
  const auto runner = spawn(4, 9);
  send(runner.socket.get(), "exit 3");
  const auto ended = next_end();
  EXPECT_EQ(ended.rank, 4);
  EXPECT_EQ(ended.generation, 9U);
  EXPECT_EQ(ended.pid, runner.started.pid);
  EXPECT_EQ(describe_exit(ended.wait_status), "exit code 3");
  EXPECT_TRUE(has_ended(runner.started.pidfd.get()));
}

TEST_F(LauncherTest, AnUncaughtExceptionIsAnExitCode) {
  const auto runner = spawn(0);
  send(runner.socket.get(), "throw");
  EXPECT_EQ(next_end().wait_status, W_EXITCODE(exit_uncaught, 0));
}

TEST_F(LauncherTest, AKilledChildIsReportedAndReplaced) {
  for (std::uint32_t generation = 1; generation <= 20; ++generation) {
    const auto runner = spawn(0, generation);
    EXPECT_EQ(runner.ask("generation"), std::to_string(generation));
    send_signal(runner.started.pidfd.get(), SIGKILL);
    const auto ended = next_end();
    EXPECT_EQ(ended.generation, generation);
    EXPECT_EQ(describe_exit(ended.wait_status), "killed by signal 9 (KILL)");
  }
}

TEST_F(LauncherTest, WhatAChildLeftInItsGroupEndsWithIt) {
  const auto runner = spawn(0);
  EXPECT_EQ(runner.ask("have a child"), "born");
  send(runner.socket.get(), "exit 3");
  next_end();
  EXPECT_FALSE(receive(runner.socket.get(), soon())) << "the grandchild still holds the socket";
}

TEST_F(LauncherTest, ChildrenDieWithTheLauncher) {
  const auto first = spawn(0);
  const auto second = spawn(1);
  EXPECT_EQ(first.ask("rank"), "0");  // Both are past PR_SET_PDEATHSIG.
  EXPECT_EQ(second.ask("ignore TERM"), "ignored");
  send_signal(launcher_->pidfd(), SIGKILL);
  EXPECT_TRUE(first.ended());
  EXPECT_TRUE(second.ended());
  EXPECT_FALSE(launcher_->next(soon()));
  EXPECT_TRUE(wait_ended(launcher_->pidfd(), soon()));
  EXPECT_THROW(launcher_->spawn(0, 2, {}), SystemError);
}

TEST_F(LauncherTest, EventsOfALauncherThatIsGoneCanStillBeTaken) {
  const auto runner = spawn(0);
  send(runner.socket.get(), "exit 3");
  pollfd report{.fd = launcher_->socket(), .events = POLLIN, .revents = 0};
  ASSERT_EQ(poll(&report, 1, 20'000), 1);
  send_signal(launcher_->pidfd(), SIGKILL);
  ASSERT_TRUE(wait_ended(launcher_->pidfd(), soon()));
  EXPECT_EQ(describe_exit(next_end().wait_status), "exit code 3");
  EXPECT_FALSE(launcher_->next(soon()));
}

TEST_F(LauncherTest, NextEndsAtItsDeadline) {
  EXPECT_FALSE(launcher_->next(base::Deadline::in_seconds(0.01)));
}

TEST_F(LauncherTest, StopEndsChildrenThatIgnoreTerm) {
  const auto runner = spawn(0);
  EXPECT_EQ(runner.ask("ignore TERM"), "ignored");
  EXPECT_EQ(runner.ask("have a child"), "born");
  launcher_->stop(soon());
  EXPECT_TRUE(has_ended(runner.started.pidfd.get()));
  EXPECT_FALSE(receive(runner.socket.get(), soon())) << "the grandchild still holds the socket";
  EXPECT_FALSE(launcher_->next(soon()));
  launcher_->stop(soon());
}

TEST_F(LauncherTest, StopIsHeardThoughOthersHoldACopyOfTheSocket) {
  const auto runner = spawn(0);
  EXPECT_EQ(runner.ask("have a child"), "born");
  auto [ours, theirs] = socket_pair();
  const auto copy = fork_child([socket = theirs.get()] {
    receive(socket, soon());
    return 0;
  });
  launcher_->stop(soon());
  // The launcher did its work; had it been killed, nobody would have ended the grandchild.
  EXPECT_FALSE(receive(runner.socket.get(), soon()));
  send(ours.get(), "end");
  EXPECT_EQ(end_of(copy), "exit code 0");
}

TEST_F(LauncherTest, AStoppedLauncherIsKilledAtTheBound) {
  const auto runner = spawn(0);
  EXPECT_EQ(runner.ask("rank"), "0");
  send_signal(launcher_->pidfd(), SIGSTOP);
  launcher_->stop(base::Deadline::in_seconds(0.02));
  EXPECT_TRUE(runner.ended());
}

TEST_F(LauncherTest, AChildThatCannotBeForkedIsReported) {
  auto [ours, theirs] = socket_pair();
  auto launcher = fork_child([&ours = ours, &theirs = theirs] {
    ours.reset();
    fail_system_call(SYS_pidfd_open, EMFILE);
    return run_launcher(std::move(theirs), obey);
  });
  theirs.reset();
  LauncherClient client(std::move(ours), std::move(launcher));
  client.spawn(5, 1, {});
  const auto ended = std::get<Ended>(client.next(soon()).value());
  EXPECT_EQ(ended.rank, 5);
  EXPECT_EQ(ended.pid, 0);
  EXPECT_EQ(ended.wait_status, W_EXITCODE(exit_not_forked, 0));
}

TEST_F(LauncherTest, EverythingDiesWithTheClient) {
  launcher_.reset();
  auto [ours, theirs] = socket_pair();
  const auto client = fork_child([socket = theirs.get()] {
    auto launcher = LauncherClient::start(obey);
    auto [runner_socket, passed] = socket_pair();
    const int fd = passed.get();
    launcher.spawn(0, 1, {&fd, 1});
    const auto started = std::get<Started>(launcher.next(soon()).value());
    send(runner_socket.get(), "rank");
    receive(runner_socket.get(), soon());
    const int pidfds[] = {launcher.pidfd(), started.pidfd.get()};
    send(socket, "started", pidfds);
    hang();
    return 0;
  });
  const auto message = receive(ours.get(), soon()).value();
  ASSERT_EQ(message.fds.size(), 2U);
  send_signal(client.pidfd.get(), SIGKILL);
  EXPECT_TRUE(wait_ended(message.fds[0].get(), soon())) << "the launcher is left";
  EXPECT_TRUE(wait_ended(message.fds[1].get(), soon())) << "the runner is left";
}

TEST_F(LauncherTest, ReportsWaitForAClientThatIsBusy) {
  launcher_.reset();
  auto [ours, theirs] = socket_pair();
  const int few_bytes = 1;  // The kernel's least: a few reports.
  ASSERT_EQ(setsockopt(theirs.get(), SOL_SOCKET, SO_SNDBUF, &few_bytes, sizeof few_bytes), 0);
  auto launcher = fork_child([&ours = ours, &theirs = theirs] {
    ours.reset();
    return run_launcher(std::move(theirs), [](const SpawnRequest& request) { return request.rank; });
  });
  theirs.reset();
  LauncherClient client(std::move(ours), std::move(launcher));
  constexpr int children = 30;
  for (int rank = 0; rank < children; ++rank) client.spawn(rank, 1, {});
  int started = 0, ended = 0;
  while (ended < children) {
    const auto event = client.next(soon());
    ASSERT_TRUE(event);
    if (const auto* start = std::get_if<Started>(&*event)) {
      EXPECT_EQ(start->rank, started++);
      EXPECT_GT(start->pid, 0);
    } else {
      const auto& end = std::get<Ended>(*event);
      EXPECT_EQ(end.wait_status, W_EXITCODE(end.rank, 0));
      ++ended;
    }
  }
  EXPECT_EQ(started, children);
}

TEST_F(LauncherTest, SignalsReachTheGroupsOfAllAndStoppedOnesGoOn) {
  const auto first = spawn(0);
  const auto second = spawn(1);
  EXPECT_EQ(first.ask("have a child"), "born");
  send_signal(second.started.pidfd.get(), SIGSTOP);
  launcher_->signal(SIGTERM);
  EXPECT_EQ(describe_exit(next_end().wait_status), "killed by signal 15 (TERM)");
  EXPECT_EQ(describe_exit(next_end().wait_status), "killed by signal 15 (TERM)");
  EXPECT_FALSE(receive(first.socket.get(), soon())) << "the grandchild still holds the socket";
}

TEST_F(LauncherTest, WhyAChildCouldNotBeForkedIsTold) {
  launcher_.reset();
  auto [ours, theirs] = socket_pair();
  auto launcher = fork_child([&ours = ours, &theirs = theirs] {
    ours.reset();
    fail_system_call(SYS_clone, EAGAIN);
    return run_launcher(std::move(theirs), obey);
  });
  theirs.reset();
  LauncherClient client(std::move(ours), std::move(launcher));
  client.spawn(5, 1, {});
  EXPECT_EQ(std::get<Ended>(client.next(soon()).value()).error, EAGAIN);
}

TEST_F(LauncherTest, TheEndOfTheSocketAloneEndsIt) {
  launcher_.reset();
  auto [ours, theirs] = socket_pair();
  const auto launcher = fork_child([&ours = ours, &theirs = theirs] {
    ours.reset();
    return run_launcher(std::move(theirs), obey);
  });
  theirs.reset();
  ours.reset();
  EXPECT_EQ(end_of(launcher), "exit code 0");
}

TEST_F(LauncherTest, ClosesWhatItIsToldTo) {
  launcher_.reset();
  auto [ours, theirs] = socket_pair();
  const int closed[] = {theirs.get()};
  launcher_.emplace(LauncherClient::start(obey, {}, closed));
  theirs.reset();
  EXPECT_FALSE(receive(ours.get(), soon()));
}

// As long as its sender lives, or a child that user code has forked there.
struct Alive {
  base::UniqueFd ours;
  bool ended() const { return wait_ready(ours.get(), POLLIN, soon()) != 0; }
};

/// A client that leads a group and has a child that nobody asked for; both do nothing. The child holds
/// `alive`.
Child client_with_a_child(base::UniqueFd& alive, const base::UniqueFd& told, int host) {
  return fork_child([&alive, &told, host] {
    setpgid(0, 0);
    auto launcher = LauncherClient::start(obey, {.creator_group = getpid(), .host = host});
    if (fork() == 0) hang();
    alive.reset();
    const int pidfd[] = {launcher.pidfd()};
    send(told.get(), "started", pidfd);
    if (receive(told.get(), soon())->bytes == "stop") {
      // Whose end the launcher cannot report any more.
      launcher.spawn(0, 1, {});
      launcher.stop(soon());
      send(told.get(), "stopped");
    }
    hang();
    return 0;
  });
}

TEST_F(LauncherTest, WhatWasForkedInAClientThatIsKilledEndsWithIt) {
  launcher_.reset();
  auto [told, tells] = socket_pair();
  auto [ours, theirs] = socket_pair();
  Alive child{std::move(ours)};
  const auto client = client_with_a_child(theirs, tells, -1);
  theirs.reset();
  const auto started = receive(told.get(), soon()).value();
  send_signal(client.pidfd.get(), SIGKILL);
  EXPECT_TRUE(child.ended()) << "what it had forked is left";
  EXPECT_TRUE(wait_ended(started.fds.at(0).get(), soon())) << "the launcher is left";
  EXPECT_EQ(end_of(client), "killed by signal 9 (KILL)");
}

TEST_F(LauncherTest, AClientThatOutlivesItsHostIsEndedWithWhatItForked) {
  launcher_.reset();
  const auto host = fork_child([] {
    hang();
    return 0;
  });
  auto [told, tells] = socket_pair();
  auto [ours, theirs] = socket_pair();
  Alive child{std::move(ours)};
  const auto client = client_with_a_child(theirs, tells, host.pidfd.get());
  theirs.reset();
  const auto started = receive(told.get(), soon()).value();
  send_signal(host.pidfd.get(), SIGKILL);
  EXPECT_EQ(end_of(client), "killed by signal 9 (KILL)");
  EXPECT_TRUE(child.ended()) << "what it had forked is left";
  EXPECT_TRUE(wait_ended(started.fds.at(0).get(), soon())) << "the launcher is left";
  EXPECT_EQ(end_of(host), "killed by signal 9 (KILL)");
}

TEST_F(LauncherTest, AClientThatStopsItIsLeftAlone) {
  launcher_.reset();
  auto [told, tells] = socket_pair();
  auto [ours, theirs] = socket_pair();
  Alive child{std::move(ours)};
  const auto client = client_with_a_child(theirs, tells, -1);
  theirs.reset();
  const auto started = receive(told.get(), soon()).value();
  send(told.get(), "stop");
  EXPECT_EQ(receive(told.get(), soon()).value().bytes, "stopped");
  EXPECT_TRUE(has_ended(started.fds.at(0).get()));
  EXPECT_FALSE(has_ended(client.pidfd.get()));
  EXPECT_FALSE(is_readable(child.ours.get()));
  kill(-client.pid, SIGKILL);
  EXPECT_EQ(end_of(client), "killed by signal 9 (KILL)");
}

TEST_F(LauncherTest, AChildWhoseDescriptorsFindNoRoomInTheLauncherIsReported) {
  launcher_.reset();
  auto [ours, theirs] = socket_pair();
  auto launcher = fork_child([&ours = ours, &theirs = theirs] {
    ours.reset();
    const rlimit limit{.rlim_cur = static_cast<rlim_t>(theirs.get()) + 1, .rlim_max = 1024};
    setrlimit(RLIMIT_NOFILE, &limit);
    return run_launcher(std::move(theirs), obey);
  });
  theirs.reset();
  LauncherClient client(std::move(ours), std::move(launcher));
  const int passed[] = {0, 1, 2, 0, 1, 2};
  for (std::uint32_t generation = 1; generation <= 2; ++generation) {
    client.spawn(5, generation, passed);
    const auto ended = std::get<Ended>(client.next(soon()).value());
    EXPECT_EQ(ended.generation, generation);
    EXPECT_EQ(ended.pid, 0);
    EXPECT_EQ(ended.error, EMFILE);
  }
}

TEST_F(LauncherTest, AChildWhosePidfdFindsNoRoomInTheClientIsEndedAndReported) {
  launcher_.reset();
  const auto client = fork_child([] {
    auto launcher = LauncherClient::start(obey);
    auto [ours, theirs] = socket_pair();
    const int passed[] = {theirs.get()};
    launcher.spawn(5, 1, passed);
    theirs.reset();
    const rlimit limit{.rlim_cur = 3, .rlim_max = 1024};
    setrlimit(RLIMIT_NOFILE, &limit);
    const auto ended = std::get<Ended>(launcher.next(soon()).value());
    if (ended.rank != 5 || ended.pid != 0 || ended.error != EMFILE) return 1;
    return receive(ours.get(), soon()) ? 2 : 0;  // Its end.
  });
  EXPECT_EQ(end_of(client), "exit code 0");
}

TEST_F(LauncherTest, WantOfMemoryForAReportIsNotTheEndOfTheClient) {
  launcher_.reset();
  auto [ours, theirs] = socket_pair();
  auto launcher = fork_child([&ours = ours, &theirs = theirs] {
    ours.reset();
    fail_system_call(SYS_sendmsg, ENOBUFS);
    return run_launcher(std::move(theirs), [](const SpawnRequest& request) -> int {
      if (write(request.fds.at(0).get(), "x", 1) == 1) hang();
      return 1;
    });
  });
  theirs.reset();
  LauncherClient client(std::move(ours), std::move(launcher));
  for (int rank = 0; rank < 2; ++rank) {
    auto [child, passed] = socket_pair();
    const int fd[] = {passed.get()};
    client.spawn(rank, 1, fd);
    passed.reset();
    EXPECT_EQ(receive(child.get(), soon()).value_or(Message{}).bytes, "x") << "child " << rank;
  }
  client.stop(soon());
}

TEST_F(LauncherTest, IsRefusedBesideThreadsWhichAreNamed) {
  std::promise<void> named, end;
  std::jthread thread([&] {
    name_process("in the way");
    named.set_value();
    end.get_future().wait();
  });
  named.get_future().wait();
  try {
    LauncherClient::start(obey);
    ADD_FAILURE() << "it was started";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("in the way"), std::string::npos) << error.what();
  }
  end.set_value();
}

}  // namespace
}  // namespace accelmgr::ipc::test
