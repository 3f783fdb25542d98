// Checks that no process is left, however a launch ends and whichever process is killed.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <latch>
#include <memory>
#include <thread>

#include "functions.hpp"
#include "launched.hpp"
#include "launcher/launch/run/spawner.hpp"

namespace accelmgr::launch::test {
namespace {

class Leftovers : public Launched {};

pid_t fork_server_of(const SpawnContext& context) {
  const auto stat = ipc::read_proc("/proc/" + std::to_string(context.pids()[0]) + "/status").value_or("");
  return static_cast<pid_t>(ipc::number_after(stat, "PPid:").value_or(0));
}

/// Forks a child of the calling rank that hangs, in a session of its own if `apart`. Rank and child tell
/// their pidfds.
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

/// Launches ranks that call `before` and run until rank 1 fails. Then all `processes` must end that have told
/// their pidfds.
template <class Before>
void expect_all_end_with_rank_1(const Line& line, const Options& chosen, int processes, Before before) {
  auto context = spawn(
      [&](int rank, const Value&) {
        before(rank);
        if (rank == 1) line.await_order();
        return obey(rank == 1 ? "exit 1" : "hang");
      },
      {}, chosen);
  const auto pidfds = line.hear_pidfds(processes);
  line.order();
  EXPECT_EQ(failure_of([&] { context.join(); }).rank(), 1);
  expect_ended(pidfds);
}

TEST_F(Leftovers, ARankThatIgnoresTermIsKilledAtTheBound) {
  const Line line;
  expect_all_end_with_rank_1(line, quick(not_joined(options(3))), 3, [&](int rank) {
    if (rank == 0) signal(SIGTERM, SIG_IGN);
    line.tell_pidfd();
  });
}

TEST_F(Leftovers, WhoHasABoundToEndInUsesIt) {
  const Line line;
  auto chosen = not_joined(options(2));
  chosen.terminate_timeout_s = 120;
  auto context = spawn(
      [&](int rank, const Value&) {
        sigset_t term;
        sigemptyset(&term);
        sigaddset(&term, SIGTERM);
        pthread_sigmask(SIG_BLOCK, &term, nullptr);
        line.tell_pidfd();
        line.await_order();
        if (rank == 1) _exit(1);
        int number = 0;
        sigwait(&term, &number);
        line.tell("cleaned up");
        return Value();
      },
      {}, chosen);
  const auto pidfds = line.hear_pidfds(2);
  line.order(2);
  failure_of([&] { context.join(); });
  EXPECT_EQ(line.hear().bytes, "cleaned up");
  expect_ended(pidfds);
}

TEST_F(Leftovers, AStoppedRankEnds) {
  const Line line;
  auto chosen = not_joined(options(2));
  chosen.terminate_timeout_s = 120;  // Not reached: SIGCONT follows SIGTERM, so the rank ends at once.
  expect_all_end_with_rank_1(line, chosen, 2, [&](int rank) {
    line.tell_pidfd();
    if (rank == 0) raise(SIGSTOP);
  });
}

TEST_F(Leftovers, GrandchildrenEndWithAFailureEvenInSessionsOfTheirOwn) {
  for (const bool apart : {false, true}) {
    const Line line;
    expect_all_end_with_rank_1(line, quick(not_joined(options(2))), 4,
                               [&](int) { have_a_child(line, apart); });
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

/// A process that launches two ranks. Each rank has a child in a session of its own. The process tells three
/// pidfds: first that of the fork server, then those of the ranks.
template <class Before>
ipc::Child launching(const Line& line, StartMethod method, Before before) {
  return fork_child([&line, method, before] {
    before();
    Spawner spawner = method == StartMethod::forkserver ? Spawner::from_zygote() : Spawner::fork();
    const int fd = spawner.pidfd();
    line.tell("fork server", {&fd, 1});
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
  expect_all_end(pidfds);
  EXPECT_EQ(end_of(client), "killed by signal 9 (KILL)");
  // Processes that the ranks started would now be children of this process.
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
                                  // All threads must be running before the fork: a thread that is just
                                  // starting may hold a lock of the sanitizer's allocator, and the forked
                                  // process would wait for it for ever.
                                  const auto running = std::make_shared<std::latch>(4);
                                  for (int i = 0; i < 4; ++i)
                                    std::thread([running] {
                                      running->count_down();
                                      hang();
                                    }).detach();
                                  running->wait();
                                }),
                      line);
}

TEST_F(Leftovers, EverythingEndsWithTheCallerThoughAForkOfItHoldsItsDescriptors) {
  // The fork is made after the launch, so it holds copies of the sockets whose closing would tell of the
  // caller's end.
  const Line line, other;
  const auto client = fork_child([&] {
    const auto context = spawn(hanging(line), {}, not_joined(options(3)));
    if (fork() == 0) {
      other.tell_pidfd();
      hang();
    }
    hang();
    return 0;
  });
  const auto pidfds = line.hear_pidfds(3), copy = other.hear_pidfds(1);
  ipc::send_signal(client.pidfd.get(), SIGKILL);
  expect_all_end(pidfds);
  EXPECT_FALSE(ipc::has_ended(copy[0].get())) << "it is nobody's business but the caller's";
  ipc::send_signal(copy[0].get(), SIGKILL);
  end_of(client);
}

TEST_F(Leftovers, EverythingEndsWithTheCallerThoughTheForkServerIsStopped) {
  const Line line;
  const auto client = fork_child([&] {
    const auto context = spawn(hanging(line), {}, not_joined(options(2)));
    const auto fork_server = ipc::open_pidfd(fork_server_of(context));
    const int fd = fork_server.get();
    ipc::send_signal(fd, SIGSTOP);
    line.tell("fork server", {&fd, 1});
    hang();
    return 0;
  });
  const auto pidfds = line.hear_pidfds(3);
  ipc::send_signal(client.pidfd.get(), SIGKILL);
  expect_all_end(pidfds);
  end_of(client);
}

TEST_F(Leftovers, AForkOfTheCallerCanLetGoOfItsCopyOfTheContext) {
  const Line line;
  auto context = spawn(until_told(line), {}, not_joined(options(2)));
  const auto pidfds = line.hear_pidfds(2);
  auto* const copied = &context;
  EXPECT_EQ(end_of(fork_child([copied] {
              copied->terminate();
              { const SpawnContext gone(std::move(*copied)); }
              return 0;
            })),
            "exit code 0");
  line.order(2);
  EXPECT_TRUE(context.join());
  EXPECT_EQ(context.results(), (std::vector<Value>{0, 1}));
}

TEST_F(Leftovers, AKilledForkServerTakesAllWithItAndIsTold) {
  for (const auto method : {StartMethod::fork, StartMethod::spawn, StartMethod::forkserver}) {
    auto context = spawn("obey", {"hang", "hang", "hang"}, not_joined(options(3, method)));
    const auto pidfds = pidfds_of(context);
    kill(fork_server_of(context), SIGKILL);
    const auto error = failure_of([&] { context.join(); });
    expect_ended(pidfds);
    // Only the parent of the fork server learns how it ended. For `forkserver` the parent is the zygote.
    EXPECT_TRUE(says(error.what(), {"fork server", method != StartMethod::forkserver ? "KILL" : "ended"}));
    expect_nothing_left();
  }
}

TEST_F(Leftovers, WhatTheRanksHadStartedEndsWithAKilledForkServerToo) {
  const Line line;
  auto context = spawn(
      [&](int, const Value&) {
        have_a_child(line, false);
        return obey("hang");
      },
      {}, not_joined(options(2)));
  const auto pidfds = line.hear_pidfds(4);
  kill(fork_server_of(context), SIGKILL);
  failure_of([&] { context.join(); });
  expect_all_end(pidfds);
}

TEST_F(Leftovers, AStoppedForkServerDoesNotHoldUpTermination) {
  auto context = spawn("obey", {"hang", "hang"}, quick(not_joined(options(2))));
  const auto pidfds = pidfds_of(context);
  kill(fork_server_of(context), SIGSTOP);
  context.terminate();
  expect_ended(pidfds);
}

TEST_F(Leftovers, OrphansThatKeepForkingAreCaughtUpWith) {
  // Each rank starts a chain of processes. Each process forks the next one and ends, as fast as it can.
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
