#include "base/ipc/user_forks.hpp"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>

#include "accelmgr/errors.hpp"

namespace accelmgr::ipc {
namespace {

// Each number is stored plus 1; 0: a free place. Not a container with a lock, which another thread may hold
// when this process is forked.
std::array<std::atomic<int>, 256> closed_in_forks;

// A thread may fork while another one enters these. The signal is stored last.
struct Handled {
  std::atomic<int> signal = 0;
  std::atomic<void (*)(int)> handler = nullptr;
};
std::array<Handled, 8> handled;

thread_local sigset_t before_fork;

// A signal that comes to the child before its handlers are reset would be taken for this process's: the
// handler writes to a pipe that both have.
void hold_signals() noexcept {
  sigset_t held;
  sigemptyset(&held);
  for (const auto& each : handled)
    if (const int number = each.signal.load(); number != 0) sigaddset(&held, number);
  pthread_sigmask(SIG_BLOCK, &held, &before_fork);
}

void release_signals() noexcept { pthread_sigmask(SIG_SETMASK, &before_fork, nullptr); }

void reset_signals() noexcept {
  for (const auto& each : handled) {
    struct sigaction now {};
    const int number = each.signal.load();
    if (number != 0 && sigaction(number, nullptr, &now) == 0 && now.sa_handler == each.handler.load())
      signal(number, SIG_DFL);
  }
  release_signals();
}

void close_all() noexcept {
  for (auto& place : closed_in_forks)
    if (const int stored = place.exchange(0); stored != 0) close(stored - 1);
}

}  // namespace

void close_in_forks(int fd) {
  static const int error = pthread_atfork(nullptr, nullptr, close_all);
  if (error != 0) throw SystemError("pthread_atfork", error);
  for (auto& place : closed_in_forks)
    if (int free = 0; place.compare_exchange_strong(free, fd + 1)) return;
  throw SystemError("keeping a descriptor from forked children", EMFILE);
}

void default_in_forks(std::span<const int> signals) {
  for (std::size_t i = 0; i < std::min(signals.size(), handled.size()); ++i) {
    struct sigaction now {};
    sigaction(signals[i], nullptr, &now);
    handled[i].handler.store(now.sa_handler);
    handled[i].signal.store(signals[i]);
  }
  static const int error = pthread_atfork(hold_signals, release_signals, reset_signals);
  if (error != 0) throw SystemError("pthread_atfork", error);
}

void keep_in_forks(int fd) noexcept {
  for (auto& place : closed_in_forks)
    if (int stored = fd + 1; place.compare_exchange_strong(stored, 0)) return;
}

}  // namespace accelmgr::ipc
