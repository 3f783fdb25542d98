// Tests of the fault handler as production code uses it: first armed, then reached. A fault that ends or
// stops a process strikes a forked child.
#include <gtest/gtest.h>

#include <fstream>
#include <thread>

#include "base/clock.hpp"
#include "base/fault_point.hpp"
#include "base/ipc/processes.hpp"
#include "base/log.hpp"
#include "message_of.hpp"

namespace accelmgr::faults {
namespace {

using base::FaultEffect;
using base::FaultPhase;

/// Arms this process as the first runner of rank 0.
void arm(const std::vector<std::string>& faults) { base::arm_faults(faults, 0, 1); }

/// A child that `fault` strikes. Its exit code is 0 if it goes on as if nothing had happened.
ipc::Child struck_child(const std::string& fault) {
  return ipc::test::fork_child([&] {
    arm({"rank=0 phase=forward fault=" + fault});
    return base::fault_point(FaultPhase::forward) == FaultEffect::none ? 0 : 1;
  });
}

/// The set of signals that `name` shows in /proc/PID/status: SigBlk, blocked by the main thread, or ShdPnd,
/// pending for the process.
std::uint64_t signal_mask(pid_t pid, const std::string& name) {
  std::ifstream status("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(name + ":")) return std::stoull(line.substr(name.size() + 1), nullptr, 16);
  return 0;
}

constexpr std::uint64_t bit_of(int signal) { return std::uint64_t{1} << (signal - 1); }

class FaultInjection : public testing::Test {
 protected:
  ~FaultInjection() override {
    arm({});
    base::set_log_step(0);
  }
};

TEST_F(FaultInjection, ForgetsThePlanOfTheParent) {
  arm({"rank=0 phase=forward fault=nan"});
  arm({});
  EXPECT_EQ(base::fault_point(FaultPhase::forward), FaultEffect::none);
}

TEST_F(FaultInjection, RefusesAFaultItCannotReadInEveryProcess) {
  EXPECT_THROW(arm({"rank=1 phase=forward"}), ConfigError);
}

TEST_F(FaultInjection, OfStopStopsUntilItIsContinued) {
  const auto child = struck_child("stop");
  int status = 0;
  ASSERT_EQ(waitpid(child.pid, &status, WUNTRACED), child.pid);
  ASSERT_TRUE(WIFSTOPPED(status)) << ipc::describe_exit(status);
  EXPECT_EQ(WSTOPSIG(status), SIGSTOP);
  ipc::send_signal(child.pidfd.get(), SIGCONT);
  EXPECT_EQ(ipc::test::end_of(child), "exit code 0");
}

TEST_F(FaultInjection, OfHangSleepsAndTakesNoSignal) {
  const auto child = struck_child("hang");
  const auto all = [] {
    std::uint64_t signals = 0;
    for (int signal = 1; signal < 32; ++signal)
      if (signal != SIGKILL && signal != SIGSTOP) signals |= bit_of(signal);
    return signals;
  }();
  const auto hangs = [&] {
    const auto usage = ipc::usage(child.pid);
    return usage && usage->state == 'S' && (signal_mask(child.pid, "SigBlk") & all) == all;
  };
  for (const auto deadline = ipc::test::soon(); !hangs();) {
    ASSERT_FALSE(deadline.passed() || ipc::has_ended(child.pidfd.get()));
    sched_yield();
  }
  ipc::send_signal(child.pidfd.get(), SIGTERM);
  EXPECT_NE(signal_mask(child.pid, "ShdPnd") & bit_of(SIGTERM), 0U) << "it did not wait";
  ipc::send_signal(child.pidfd.get(), SIGKILL);
  EXPECT_EQ(ipc::test::end_of(child), "killed by signal 9 (KILL)");
}

TEST_F(FaultInjection, OfSlowLastsAtLeastThatLong) {
  arm({"rank=0 phase=forward fault=slow:20"});
  const auto begin = base::now_ns();
  EXPECT_EQ(base::fault_point(FaultPhase::forward), FaultEffect::none);
  EXPECT_GE(base::now_ns() - begin, 20'000'000);
}

TEST_F(FaultInjection, ActsOnAllFaultsOfAPlace) {
  arm({"rank=0 phase=forward fault=nan", "rank=0 phase=forward fault=slow:1"});
  EXPECT_EQ(base::fault_point(FaultPhase::forward), FaultEffect::nan);
}

TEST_F(FaultInjection, CountsTheReachesOfAllThreads) {
  constexpr int threads = 4, reaches = 1000;
  arm({"rank=0 phase=forward occurrence=" + std::to_string(threads * reaches) + " fault=nan"});
  std::atomic<int> struck{0};
  std::vector<std::jthread> all;
  for (int i = 0; i < threads; ++i)
    all.emplace_back([&] {
      for (int j = 0; j < reaches; ++j)
        if (base::fault_point(FaultPhase::forward) == FaultEffect::nan) ++struck;
    });
  all.clear();
  EXPECT_EQ(struck, 1);
}

}  // namespace
}  // namespace accelmgr::faults
