// However a launch ends, and whoever is killed: no process is left.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "functions.hpp"
#include "launch/spawner.hpp"
#include "launched.hpp"

namespace accelmgr::launch::test {
namespace {

class Leftovers : public Launched {};

pid_t launcher_of(const SpawnContext& context) {
  const auto stat = ipc::read_proc("/proc/" + std::to_string(context.pids()[0]) + "/status").value_or("");
  return static_cast<pid_t>(ipc::number_after(stat, "PPid:").value_or(0));
}

/// A child of the calling rank that hangs, in a session of its own if `apart`; both tell their pidfds.
void have_a_child(const Line& line, bool apart) {
  const Line born;
  if (fork() == 0) {
    if (apart) setsid();
    signal(SIGTERM, SIG_IGN);
    line.tell_pidfd();
    born.tell("born");
    hang();
  }
  born.hear();
  line.tell_pidfd();
}

Options quick(Options options) {
  options.terminate_timeout_s = 0.05;
  return options;
}

TEST_F(Leftovers, ARankThatIgnoresTermIsKilledAtTheBound) {
  const Line line;
  auto context = spawn(
      [&](int rank, const Value&) {
        if (rank == 0) signal(SIGTERM, SIG_IGN);
        line.tell_pidfd();
        if (rank == 1) ipc::receive(line.theirs.get(), soon());
        return obey(rank == 1 ? "exit 1" : "hang");
      },
      {}, quick(not_joined(options(3))));
  const auto pidfds = line.hear_pidfds(3);
  ipc::send(line.ours.get(), "fail");
  EXPECT_EQ(failure_of([&] { context.join(); }).rank(), 1);
  expect_ended(pidfds);
}

TEST_F(Leftovers, WhoHasABoundToEndInUsesIt) {
  const Line line;
  auto chosen = not_joined(options(2));
  chosen.terminate_timeout_s = 20;
  auto context = spawn(
      [&](int rank, const Value&) {
        static std::atomic<bool> asked{false};
        signal(SIGTERM, [](int) { asked = true; });
        line.tell_pidfd();
        ipc::receive(line.theirs.get(), soon());
        if (rank == 1) _exit(1);
        while (!asked) pause();
        line.tell("cleaned up");
        return Value();
      },
      {}, chosen);
  const auto pidfds = line.hear_pidfds(2);
  ipc::send(line.ours.get(), "go");
  ipc::send(line.ours.get(), "go");
  failure_of([&] { context.join(); });
  EXPECT_EQ(line.hear().bytes, "cleaned up");
  expect_ended(pidfds);
}

TEST_F(Leftovers, AStoppedRankEnds) {
  const Line line;
  auto chosen = not_joined(options(2));
  chosen.terminate_timeout_s = 20;  // TERM with CONT ends it at once; the test's own bound is not reached.
  auto context = spawn(
      [&](int rank, const Value&) {
        line.tell_pidfd();
        if (rank == 0) raise(SIGSTOP);
        ipc::receive(line.theirs.get(), soon());
        return obey("exit 1");
      },
      {}, chosen);
  const auto pidfds = line.hear_pidfds(2);
  ipc::send(line.ours.get(), "fail");
  EXPECT_EQ(failure_of([&] { context.join(); }).rank(), 1);
  expect_ended(pidfds);
}

TEST_F(Leftovers, GrandchildrenEndWithAFailureEvenInSessionsOfTheirOwn) {
  for (const bool apart : {false, true}) {
    const Line line;
    auto context = spawn(
        [&](int rank, const Value&) {
          have_a_child(line, apart);
          if (rank == 1) ipc::receive(line.theirs.get(), soon());
          return obey(rank == 1 ? "exit 1" : "hang");
        },
        {}, quick(not_joined(options(2))));
    const auto pidfds = line.hear_pidfds(4);
    ipc::send(line.ours.get(), "fail");
    EXPECT_EQ(failure_of([&] { context.join(); }).rank(), 1);
    expect_ended(pidfds);
  }
}

TEST_F(Leftovers, GrandchildrenEndWhenAllHaveReturned) {
  for (const bool apart : {false, true}) {
    const Line line;
    spawn(
        [&](int, const Value&) {
          have_a_child(line, apart);
          return Value();
        },
        {}, options(2));
    expect_ended(line.hear_pidfds(4));
  }
}

TEST_F(Leftovers, TerminateEndsAllWithoutAFailure) {
  const Line line;
  auto context = spawn(
      [&](int, const Value&) {
        have_a_child(line, true);
        return obey("hang");
      },
      {}, not_joined(options(3)));
  const auto pidfds = line.hear_pidfds(6);
  context.terminate();
  expect_ended(pidfds);
  EXPECT_TRUE(context.join());
}

/// A process that launches ranks, each with a child in a session of its own, and what it tells of them: the
/// pidfds of all, the launcher's first.
template <class Before>
ipc::Child launching(const Line& line, StartMethod method, Before before) {
  return fork_child([&line, method, before] {
    before();
    Spawner spawner = method == StartMethod::forkserver ? Spawner::execute() : Spawner::fork();
    const int fd = spawner.pidfd();
    line.tell("launcher", {&fd, 1});
    std::vector<base::UniqueFd> reports;
    const Task task{.rank = 0,
                    .environment = {{"PATH", "/usr/bin:/bin"}},
                    .program = {"sh", "-c", "setsid sleep 60 & sleep 60 & wait"},
                    .call = {},
                    .execute_self = false};
    for (int slot = 0; slot < 2; ++slot) reports.push_back(spawner.start(slot, task));
    for (int slot = 0; slot < 2; ++slot) {
      const auto started = std::get<ipc::Started>(spawner.next(soon()).value());
      const int pidfd = started.pidfd.get();
      line.tell("rank", {&pidfd, 1});
    }
    hang();
    return 0;
  });
}

void expect_all_end_with(const ipc::Child& client, const Line& line) {
  const auto pidfds = line.hear_pidfds(3);
  ipc::send_signal(client.pidfd.get(), SIGKILL);
  for (const auto& pidfd : pidfds) EXPECT_TRUE(ipc::wait_ended(pidfd.get(), soon()));
  EXPECT_EQ(end_of(client), "killed by signal 9 (KILL)");
  // What the ranks had started would become ours.
  expect_nothing_left();
}

TEST_F(Leftovers, EverythingEndsWithTheCaller) {
  for (const auto method : {StartMethod::fork, StartMethod::forkserver}) {
    const Line line;
    expect_all_end_with(launching(line, method, [] {}), line);
  }
}

TEST_F(Leftovers, EverythingEndsWithACallerOfManyThreads) {
  const Line line;
  expect_all_end_with(launching(line, StartMethod::fork,
                                [] {
                                  for (int i = 0; i < 4; ++i) std::thread([] { hang(); }).detach();
                                }),
                      line);
}

TEST_F(Leftovers, EverythingEndsWithTheCallerThoughAForkOfItHoldsItsDescriptors) {
  // Made after the launch: it has copies of the sockets whose ends would tell.
  const Line line, other;
  const auto client = fork_child([&] {
    auto context = spawn(
        [&](int, const Value&) {
          line.tell_pidfd();
          return obey("hang");
        },
        {}, not_joined(options(3)));
    if (fork() == 0) {
      other.tell_pidfd();
      hang();
    }
    hang();
    return 0;
  });
  const auto pidfds = line.hear_pidfds(3), copy = other.hear_pidfds(1);
  ipc::send_signal(client.pidfd.get(), SIGKILL);
  for (const auto& pidfd : pidfds) EXPECT_TRUE(ipc::wait_ended(pidfd.get(), soon()));
  EXPECT_FALSE(ipc::has_ended(copy[0].get())) << "it is nobody's business but the caller's";
  ipc::send_signal(copy[0].get(), SIGKILL);
  end_of(client);
}

TEST_F(Leftovers, EverythingEndsWithTheCallerThoughTheLauncherIsStopped) {
  const Line line;
  const auto client = fork_child([&] {
    const auto context = spawn(
        [&](int, const Value&) {
          line.tell_pidfd();
          return obey("hang");
        },
        {}, not_joined(options(2)));
    const auto launcher = ipc::open_pidfd(launcher_of(context));
    const int fd = launcher.get();
    ipc::send_signal(fd, SIGSTOP);
    line.tell("launcher", {&fd, 1});
    hang();
    return 0;
  });
  const auto pidfds = line.hear_pidfds(3);
  ipc::send_signal(client.pidfd.get(), SIGKILL);
  for (const auto& pidfd : pidfds) EXPECT_TRUE(ipc::wait_ended(pidfd.get(), soon()));
  end_of(client);
}

TEST_F(Leftovers, AForkOfTheCallerCanLetGoOfItsCopyOfTheContext) {
  const Line line;
  auto context = spawn(
      [&](int rank, const Value&) {
        line.tell_pidfd();
        ipc::receive(line.theirs.get(), soon());
        return Value(rank);
      },
      {}, not_joined(options(2)));
  const auto pidfds = line.hear_pidfds(2);
  auto* const copied = &context;
  EXPECT_EQ(end_of(fork_child([copied] {
              copied->terminate();
              { const SpawnContext gone(std::move(*copied)); }
              return 0;
            })),
            "exit code 0");
  ipc::send(line.ours.get(), "end");
  ipc::send(line.ours.get(), "end");
  EXPECT_TRUE(context.join());
  EXPECT_EQ(context.results(), (std::vector<Value>{0, 1}));
}

TEST_F(Leftovers, AKilledLauncherTakesAllWithItAndIsTold) {
  for (const auto method : {StartMethod::fork, StartMethod::spawn, StartMethod::forkserver}) {
    auto context = spawn("obey", {"hang", "hang", "hang"}, not_joined(options(3, method)));
    std::vector<base::UniqueFd> pidfds;
    for (const pid_t pid : context.pids()) pidfds.push_back(ipc::open_pidfd(pid));
    kill(launcher_of(context), SIGKILL);
    const auto error = failure_of([&] { context.join(); });
    expect_ended(pidfds);
    EXPECT_NE(std::string(error.what()).find("launcher"), std::string::npos) << error.what();
    // Whose child it is knows how it ended; that is the forkserver's.
    const bool is_ours = method != StartMethod::forkserver;
    EXPECT_NE(std::string(error.what()).find(is_ours ? "KILL" : "ended"), std::string::npos) << error.what();
    expect_nothing_left();
  }
}

TEST_F(Leftovers, WhatTheRanksHadStartedEndsWithAKilledLauncherToo) {
  const Line line;
  auto context = spawn(
      [&](int, const Value&) {
        have_a_child(line, false);
        return obey("hang");
      },
      {}, not_joined(options(2)));
  const auto pidfds = line.hear_pidfds(4);
  kill(launcher_of(context), SIGKILL);
  failure_of([&] { context.join(); });
  for (const auto& pidfd : pidfds) EXPECT_TRUE(ipc::wait_ended(pidfd.get(), soon()));
}

TEST_F(Leftovers, AStoppedLauncherDoesNotHoldUpTermination) {
  auto context = spawn("obey", {"hang", "hang"}, quick(not_joined(options(2))));
  std::vector<base::UniqueFd> pidfds;
  for (const pid_t pid : context.pids()) pidfds.push_back(ipc::open_pidfd(pid));
  kill(launcher_of(context), SIGSTOP);
  context.terminate();
  expect_ended(pidfds);
}

TEST_F(Leftovers, OrphansThatKeepForkingAreCaughtUpWith) {
  // A chain of processes, each the orphan of the one before it, as fast as they can.
  const Line line;
  spawn(
      [&](int, const Value&) {
        const Line born;
        if (fork() == 0) {
          setsid();
          line.tell_pidfd();
          born.tell("born");
          for (int i = 0; i < 2000; ++i)
            if (fork() != 0) _exit(0);
          hang();
        }
        born.hear();
        return Value();
      },
      {}, options(2));
  expect_nothing_left();
  expect_ended(line.hear_pidfds(2));
}

}  // namespace
}  // namespace accelmgr::launch::test
