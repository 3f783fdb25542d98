#include "base/ipc/epoch.hpp"

#include <gtest/gtest.h>
#include <signal.h>

#include <thread>
#include <vector>

#include "base/ipc/memory.hpp"
#include "base/ipc/process.hpp"
#include "processes.hpp"
#include "system_call.hpp"

namespace accelmgr::ipc::test {
namespace {

constexpr std::int64_t long_ns = 20'000'000'000;  // A wait takes this long only if a wake-up is lost.

void wait_until_parked(const Epoch& epoch, std::uint32_t waiters) {
  while (epoch.waiters.load() < waiters) std::this_thread::yield();
}

/// Waits until `mine` advances, then advances `other`; does so `rounds` times. Returns how many wake-ups were
/// lost.
int answer(Epoch& mine, Epoch& other, int rounds, int spin_us) {
  int lost = 0;
  for (std::uint32_t seen = 0; seen < static_cast<std::uint32_t>(rounds); ++seen) {
    lost += wait_changed(mine, seen, long_ns, spin_us) ? 0 : 1;
    advance(other);
  }
  return lost;
}

int ask(Epoch& other, Epoch& mine, int rounds, int spin_us) {
  int lost = 0;
  for (std::uint32_t seen = 0; seen < static_cast<std::uint32_t>(rounds); ++seen) {
    advance(other);
    lost += wait_changed(mine, seen, long_ns, spin_us) ? 0 : 1;
  }
  return lost;
}

class EpochSpin : public testing::TestWithParam<int> {};

TEST_P(EpochSpin, LosesNoWakeUpBetweenThreads) {
  constexpr int rounds = 20'000;
  Epoch to{}, back{};
  int lost = 0;
  std::jthread other([&] { lost = answer(to, back, rounds, GetParam()); });
  EXPECT_EQ(ask(to, back, rounds, GetParam()), 0);
  other.join();
  EXPECT_EQ(lost, 0);
  EXPECT_EQ(to.waiters.load(), 0U);
  EXPECT_EQ(back.waiters.load(), 0U);
}

TEST_P(EpochSpin, LosesNoWakeUpBetweenProcesses) {
  constexpr int rounds = 5'000;
  const auto fd = create_memfd("epochs", 4096);
  const Mapping map(fd.get(), 0, 4096, Access::read_write);
  auto* const epochs = reinterpret_cast<Epoch*>(map.data());
  const auto child = fork_child([&] {
    const Mapping elsewhere(fd.get(), 0, 4096, Access::read_write);
    auto* const same = reinterpret_cast<Epoch*>(elsewhere.data());
    return answer(same[0], same[1], rounds, GetParam());
  });
  EXPECT_EQ(ask(epochs[0], epochs[1], rounds, GetParam()), 0);
  EXPECT_EQ(end_of(child), "exit code 0");
}

INSTANTIATE_TEST_SUITE_P(Microseconds, EpochSpin, testing::Values(0, 1, 50));

TEST(Epoch, WhatWasWrittenBeforeTheAdvanceIsSeenAfterTheWait) {
  constexpr std::uint32_t rounds = 5'000;
  Epoch to{}, back{};
  std::uint64_t plain = 0;  // Not atomic: the thread sanitizer watches it.
  std::jthread writer([&] {
    for (std::uint32_t i = 0; i < rounds; ++i) {
      plain = i + 1;
      advance(to);
      wait_changed(back, i, long_ns, 0);
    }
  });
  for (std::uint32_t i = 0; i < rounds; ++i) {
    ASSERT_TRUE(wait_changed(to, i, long_ns, 0));
    ASSERT_EQ(plain, i + 1);
    advance(back);
  }
}

TEST(Epoch, OneAdvanceWakesAllThatWait) {
  Epoch epoch{};
  std::atomic<int> woken{0};
  {
    std::vector<std::jthread> waiters;
    for (int i = 0; i < 4; ++i)
      waiters.emplace_back([&] { woken += wait_changed(epoch, 0, long_ns, 0) ? 1 : 0; });
    wait_until_parked(epoch, 4);
    advance(epoch);
  }
  EXPECT_EQ(woken.load(), 4);
}

TEST(Epoch, WakeAllIsAnAdvanceToo) {
  Epoch epoch{};
  bool changed = false;
  std::jthread waiter([&] { changed = wait_changed(epoch, 0, long_ns, 0); });
  wait_until_parked(epoch, 1);
  wake_all(epoch);
  waiter.join();
  EXPECT_TRUE(changed);
  EXPECT_EQ(load(epoch), 1U);
}

TEST(Epoch, AWaitEndsAtItsTimeout) {
  Epoch epoch{};
  for (const int spin_us : {0, 100}) {
    EXPECT_FALSE(wait_changed(epoch, 0, 1'000'000, spin_us));
    EXPECT_FALSE(wait_changed(epoch, 0, 0, spin_us));
    EXPECT_FALSE(wait_changed(epoch, 0, -1, spin_us));
  }
  EXPECT_EQ(epoch.waiters.load(), 0U);
}

TEST(Epoch, AWaiterThatWasKilledStopsNobody) {
  const auto fd = create_memfd("epochs", 4096);
  const Mapping map(fd.get(), 0, 4096, Access::read_write);
  auto& epoch = *reinterpret_cast<Epoch*>(map.data());
  const auto wait = [&] { return wait_changed(epoch, 0, long_ns, 0) ? 0 : 1; };
  const auto killed = fork_child(wait);
  wait_until_parked(epoch, 1);
  send_signal(killed.pidfd.get(), SIGKILL);
  EXPECT_EQ(end_of(killed), "killed by signal 9 (KILL)");
  const auto other = fork_child(wait);
  wait_until_parked(epoch, 2);
  advance(epoch);
  EXPECT_EQ(end_of(other), "exit code 0");
}

TEST(Epoch, AnAdvanceMakesASystemCallOnlyIfSomebodyWaits) {
  const auto advance_with_waiters = [](std::uint32_t waiters) {
    return fork_child([waiters] {
      Epoch epoch{};
      epoch.waiters = waiters;
      die_of_system_call(SYS_futex);
      advance(epoch);
      return 0;
    });
  };
  EXPECT_EQ(end_of(advance_with_waiters(0)), "exit code 0");
  EXPECT_EQ(end_of(advance_with_waiters(1)), "killed by signal 31 (SYS)");
}

TEST(Epoch, ASpinThatSucceedsMakesNoSystemCall) {
  const auto fd = create_memfd("epochs", 4096);
  const Mapping map(fd.get(), 0, 4096, Access::read_write);
  auto* const epochs = reinterpret_cast<Epoch*>(map.data());
  const auto child = fork_child([&] {
    die_of_system_call(SYS_futex);
    advance(epochs[1]);
    return wait_changed(epochs[0], 0, long_ns, 20'000'000) ? 0 : 1;
  });
  EXPECT_TRUE(wait_changed(epochs[1], 0, long_ns, 20'000'000));
  advance(epochs[0]);
  EXPECT_EQ(end_of(child), "exit code 0");
}

}  // namespace
}  // namespace accelmgr::ipc::test
