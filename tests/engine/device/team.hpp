// A team of devices, with the fakes: each rank has a device, streams and a communicator.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/cuda/device_collectives.hpp"
#include "engine/replica/replica.hpp"
#include "engine/support/fake_nccl.hpp"

namespace accelmgr::test {

/// Wants everything until it is told otherwise, from any thread.
class TeamWaiter final : public base::Waiter {
 public:
  bool wanted() override {
    ++asked;
    return wants;
  }
  void never_ends(const std::string& what) override { told = what; }
  std::atomic<bool> wants = true;
  std::atomic<int> asked = 0;
  std::string told{};  ///< What never ends. The thread that aborts writes it.
};

class Team {
 public:
  struct Options {
    int size = 3;
    FakeCuda::Execution execution = FakeCuda::Execution::threads;
    std::uint64_t seed = 0;
    FakeNccl::FirstOperation first = FakeNccl::FirstOperation::soon;
    double timeout_s = 30;
  };
  struct Rank {
    Rank(int number, const device::NcclId& id, const Options& options)
        : device(FakeCuda::runtime(), number),
          streams{{device.make_stream(), device.make_stream()}},
          event(device.make_event()),
          collectives(device, FakeNccl::table(), id, number, options.size, sink, options.timeout_s) {}
    /// Waits until the stream has done what was queued.
    bool wait(const device::Stream& stream) {
      device.record(event, stream.get());
      return collectives.wait(event);
    }
    device::Stream& stream() { return streams[0]; }

    TeamWaiter sink;
    device::Device device;
    std::array<device::Stream, 2> streams;
    device::Event event;
    device::Memory memory = device.allocate(64);
    device::DeviceCollectives collectives;
  };

  explicit Team(const Options& options)
      : options_(options), cuda(options.execution, options.seed), nccl(options.seed, options.first) {}

  /// On this thread, one rank after the other.
  void make_all() {
    for (int rank = 0; rank < options_.size; ++rank) make(rank);
  }
  Rank& make(int rank) {
    ranks.resize(static_cast<std::size_t>(options_.size));
    return *(ranks[static_cast<std::size_t>(rank)] = std::make_unique<Rank>(rank, id, options_));
  }
  Rank& operator[](int rank) { return *ranks[static_cast<std::size_t>(rank)]; }
  bool connect() {
    bool all = true;
    for (const auto& rank : ranks) all = rank->collectives.connect(60) && all;
    return all;
  }
  /// Does that with each rank, in a thread of its own.
  void run(const std::function<void(Rank&)>& work) {
    std::vector<std::thread> threads;
    for (int number = 0; number < options_.size; ++number)
      threads.emplace_back([&, number] {
        Rank rank(number, id, options_);
        work(rank);
      });
    for (auto& thread : threads) thread.join();
  }
  int size() const { return options_.size; }

 private:
  const Options options_;

 public:
  FakeCuda cuda;
  FakeNccl nccl;
  const device::NcclId id = device::DeviceCollectives::make_id(FakeNccl::table());
  std::vector<std::unique_ptr<Rank>> ranks;
};

/// All ranks are made on this thread, and connected.
struct ConnectedTeam : Team {
  explicit ConnectedTeam(const Options& options) : Team(options) {
    make_all();
    EXPECT_TRUE(connect());
  }
};

/// Expects that ranks, which end here, have made no mistake and left nothing.
inline void expect_clean(Team& team, int aborts) {
  team.ranks.clear();
  EXPECT_EQ(team.nccl.live(), 0);
  EXPECT_EQ(team.nccl.misuses(), std::vector<std::string>{});
  EXPECT_EQ(team.nccl.mismatches(), std::vector<std::string>{});
  EXPECT_EQ(team.nccl.calls("ncclCommAbort"), aborts);
}

}  // namespace accelmgr::test
