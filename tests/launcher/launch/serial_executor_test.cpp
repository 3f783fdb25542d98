// Tests of SerialExecutor: one process at a time is inside, even if processes die inside.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <thread>

#include "accelmgr/errors.hpp"
#include "functions.hpp"
#include "launched.hpp"

namespace accelmgr::launch::test {
namespace {

class Serial : public Launched {};

/// Counts in memory that forked processes share.
struct Shared {
  int inside = 0;  ///< Not atomic: only the process inside changes it.
  int most = 0;
  int entries = 0;
};

Shared& shared() {
  void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return *new (memory) Shared;
}

void enter_often(SerialExecutor& executor, Shared& seen) {
  for (int i = 0; i < 500; ++i)
    executor.run([&] {
      seen.most = std::max(seen.most, ++seen.inside);
      if (i % 10 == 0) sched_yield();
      --seen.inside;
      ++seen.entries;
    });
}

TEST_F(Serial, OneRankAtATimeIsInsideThoughItsExecutorWasMadeBeforeTheFork) {
  auto& seen = shared();
  SerialExecutor before("same");
  spawn(
      [&](int rank, const Value&) {
        SerialExecutor after("same");
        enter_often(rank % 2 == 0 ? before : after, seen);
        return Value();
      },
      {}, options(4));
  EXPECT_EQ(seen.most, 1);
  EXPECT_EQ(seen.entries, 2000);
}

TEST_F(Serial, WorksInPlainForksAndThreads) {
  auto& seen = shared();
  SerialExecutor executor("plain");
  const auto first = fork_child([&] { return enter_often(executor, seen), 0; });
  const auto second = fork_child([&] { return enter_often(executor, seen), 0; });
  std::thread thread([&] { enter_often(executor, seen); });
  enter_often(executor, seen);
  thread.join();
  EXPECT_EQ(end_of(first), "exit code 0");
  EXPECT_EQ(end_of(second), "exit code 0");
  EXPECT_EQ(seen.most, 1);
  EXPECT_EQ(seen.entries, 2000);
}

TEST_F(Serial, ReturnsWhatTheFunctionReturnsAndThrowsWhatItThrows) {
  SerialExecutor executor;
  EXPECT_EQ(executor.run([] { return 5; }), 5);
  EXPECT_THROW(executor.run([]() -> int { throw std::out_of_range("so"); }), std::out_of_range);
  EXPECT_EQ(executor.run([] { return 6; }), 6) << "it was left";
}

TEST_F(Serial, DeathInsideLetsTheNextOneIn) {
  SerialExecutor executor("deadly", 20);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(end_of(fork_child([&] {
                executor.run([] { raise(SIGKILL); });
                return 0;
              })),
              "killed by signal 9 (KILL)");
    EXPECT_EQ(executor.run([] { return 1; }), 1);
  }
}

TEST_F(Serial, WhoDoesNotGetInIsToldWhoIsInside) {
  const Line line;
  SerialExecutor executor("busy", 1.5);  // Long enough for many tries.
  const auto inside = fork_child([&] {
    executor.run([&] {
      line.tell("inside");
      line.await_order();
    });
    return 0;
  });
  line.hear();
  const auto message = message_of<SessionError>([&] { executor.run([] {}); });
  EXPECT_TRUE(says(message, {"'busy'", "process " + std::to_string(inside.pid)}));
  line.order();
  EXPECT_EQ(end_of(inside), "exit code 0");
  executor.run([] {});
}

TEST_F(Serial, EnteringTwiceIsAnErrorNotAWait) {
  SerialExecutor one("twice"), same("twice");
  EXPECT_EQ(message_of<UsageError>([&] { one.run([&] { same.run([] {}); }); }),
            "serial executor 'twice': this thread is already in its run()");
  one.run([] {});
}

TEST_F(Serial, ThereMayBeAsManyAsAreNeededAndThoseOfOtherNamesDoNotWait) {
  EXPECT_EQ(message_of<UsageError>([] { SerialExecutor executor(""); }),
            "the name of a serial executor must not be empty");
  std::deque<SerialExecutor> all;
  for (int i = 0; i < 1000; ++i) all.emplace_back("name " + std::to_string(i) + std::string(100, 'n'), 1);
  EXPECT_EQ(all.front().run([&] { return all.back().run([] { return 4; }); }), 4);
}

TEST_F(Serial, AForkInsideDoesNotEndTheTurnOfItsParent) {
  SerialExecutor executor("parent", 0.02);
  executor.run([&] {
    EXPECT_EQ(end_of(fork_child([&] { return 0; })), "exit code 0");
    EXPECT_EQ(end_of(fork_child([&] {
                const auto message = message_of<SessionError>([&] { executor.run([] {}); });
                return says(message, {"process " + std::to_string(getppid())}) ? 0 : 1;
              })),
              "exit code 0");
  });
  executor.run([] {});
}

TEST_F(Serial, AMemoryThatIsNoneIsRefused) {
  setenv("ACCELMGR_SERIAL_MEMORY", "/dev/null", 1);
  const auto of_null = message_of<SessionError>([] { SerialExecutor executor("x"); });
  setenv("ACCELMGR_SERIAL_MEMORY", "/nowhere", 1);
  const auto of_nothing = message_of<SystemError>([] { SerialExecutor executor("x"); });
  unsetenv("ACCELMGR_SERIAL_MEMORY");
  EXPECT_TRUE(says(of_null, {"ACCELMGR_SERIAL_MEMORY (/dev/null) is not the memory of serial executors"}));
  EXPECT_TRUE(says(of_nothing, {"opening /nowhere of ACCELMGR_SERIAL_MEMORY"}));
}

}  // namespace
}  // namespace accelmgr::launch::test
