// Ends the caller of spawn() by a signal or by Ctrl-C at ever later moments of the start, and checks that no
// process is left.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/time.h>
#include <unistd.h>

#include "functions.hpp"
#include "launched.hpp"

namespace accelmgr::launch::test {
namespace {

class Interruption : public Launched, public testing::WithParamInterface<StartMethod> {};

void launch_and_hang(StartMethod method) {
  const auto context = spawn("obey", {"hang", "hang", "hang"}, not_joined(options(3, method)));
  for (;;) pause();  // Not hang(), which would set the timer again.
}

/// The duration of spawn() in a process of its own, with the start of the zygote.
std::int64_t start_us(StartMethod method) {
  const Line line;
  const auto begin_ns = base::now_ns();
  const auto client = fork_child([&] {
    const auto context = spawn("obey", {"hang", "hang", "hang"}, not_joined(options(3, method)));
    line.tell("started");
    hang();
    return 0;
  });
  line.hear();
  const auto end_ns = base::now_ns();
  ipc::send_signal(client.pidfd.get(), SIGKILL);
  end_of(client);
  expect_nothing_left();
  return (end_ns - begin_ns) / 1000;
}

void at(std::int64_t us) {
  itimerval timer{};
  timer.it_value.tv_sec = us / 1'000'000;
  timer.it_value.tv_usec = us % 1'000'000;
  setitimer(ITIMER_REAL, &timer, nullptr);
}

/// Ends a launching process by SIGALRM at many moments of its start. `arm` says what SIGALRM does; the
/// process must end as `end` says.
template <class Arm>
void end_at_many_moments(StartMethod method, const std::string& end, Arm arm) {
  constexpr int moments = 30;
  const auto whole_us = start_us(method);
  for (int i = 1; i <= moments; ++i) {
    const auto client = fork_child([&] {
      arm();
      at(std::max<std::int64_t>(1, whole_us * 5 / 4 * i / moments));
      launch_and_hang(method);
      return 0;
    });
    EXPECT_EQ(end_of(client), end);
    expect_nothing_left();
  }
}

TEST_P(Interruption, DeathAtAnyMomentLeavesNothing) {
  end_at_many_moments(GetParam(), "killed by signal 14 (ALRM)", [] { signal(SIGALRM, SIG_DFL); });
}

TEST_P(Interruption, ControlCAtAnyMomentLeavesNothing) {
  end_at_many_moments(GetParam(), "killed by signal 2 (INT)", [] {
    setpgid(0, 0);  // A process group gets a terminal's Ctrl-C, so launched processes in it get SIGINT too.
    signal(SIGALRM, [](int) { kill(0, SIGINT); });
  });
}

INSTANTIATE_TEST_SUITE_P(StartMethods, Interruption, every_method, method_name);

}  // namespace
}  // namespace accelmgr::launch::test
