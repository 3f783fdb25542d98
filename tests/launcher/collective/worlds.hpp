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

/// Runs body() in a forked child, which exits with 0 if body() returns and no expectation in it has failed.
template <class Body>
ipc::Child checked_child(Body body) {
  return ipc::test::fork_child([&body] {
    alarm(60);
    try {
      body();
    } catch (const std::exception& error) {
      ADD_FAILURE() << "a child threw: " << error.what();
    }
    fflush(nullptr);
    return testing::Test::HasFailure() ? 1 : 0;
  });
}

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

}  // namespace accelmgr::collective::test
