// Worlds for the tests of collectives: their ranks are threads or forked processes.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "base/ipc/processes.hpp"
#include "launcher/collective/shm/factory.hpp"

namespace accelmgr::collective::test {

/// A timeout that only a failing test reaches: longer than anything here takes on a loaded machine.
constexpr double long_s = 60;

/// Runs body(communicator) for each of `size` ranks, in a thread of its own. The test fails if it throws.
inline void run_threads(int size, const std::function<void(Communicator&)>& body,
                        shm::Waiting waiting = shm::Waiting::by_cores) {
  const auto world = shm::create_world(size, waiting);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto communicator =
            shm::join_world(world.get(), rank, {.timeout_s = long_s, .world_ranks = {}});
        body(*communicator);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
}

/// Ranks as forked processes, killed at the latest by the destructor.
class Processes {
 public:
  Processes() = default;
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;
  ~Processes() {
    for (auto& child : children_) {
      if (child.pid == 0) continue;
      ipc::send_signal(child.pidfd.get(), SIGKILL);
      waitpid(child.pid, nullptr, 0);
    }
  }

  /// Blocks until the process has stopped itself.
  void wait_stopped(std::size_t i) {
    siginfo_t info{};
    waitid(P_PID, static_cast<id_t>(children_.at(i).pid), &info, WSTOPPED | WNOWAIT);
  }

  /// Runs body() in a forked child, which exits with 0 if body() returns and no expectation in it has failed.
  template <class Body>
  void start(Body body) {
    children_.push_back(ipc::test::fork_child([&body] {
      alarm(60);
      try {
        body();
      } catch (const std::exception& error) {
        ADD_FAILURE() << "a child threw: " << error.what();
      }
      fflush(nullptr);
      return testing::Test::HasFailure() ? 1 : 0;
    }));
  }

  void signal(std::size_t index, int number) { ipc::send_signal(children_[index].pidfd.get(), number); }

  /// Waits for the end of a child and says how it ended: "exit code 0" if all went well.
  std::string end_of(std::size_t index) {
    auto how = ipc::test::end_of(children_[index]);
    children_[index].pid = 0;
    return how;
  }

 private:
  std::vector<ipc::Child> children_;
};

/// Values that the processes of a test share, all 0 at first.
template <class T>
class Shared {
 public:
  Shared() : p_(map()) {}
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  ~Shared() { munmap(p_, sizeof(T)); }
  T* operator->() const { return p_; }
  T& operator*() const { return *p_; }

 private:
  static T* map() {
    void* p = mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    return new (p) T{};
  }
  T* p_;
};

/// Waits until `flag` is at least `value`; fails after a long time.
inline void wait_for(const std::atomic<int>& flag, int value = 1) {
  const auto deadline = base::Deadline::in_seconds(long_s);
  while (flag.load() < value) {
    ASSERT_FALSE(deadline.passed()) << "nobody went on";
    std::this_thread::yield();
  }
}

}  // namespace accelmgr::collective::test
