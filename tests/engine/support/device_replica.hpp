// A replica of a Network that behaves like one on a device. Parameters, gradients and buffers are in its own
// memory. run() returns at once and a thread computes. collect() hands over the gradients, the last
// parameter's first.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "engine/support/network.hpp"

namespace accelmgr::test {

class DeviceReplica final : public replica::Replica {
 public:
  explicit DeviceReplica(std::unique_ptr<Network> network) : network_(std::move(network)) {}
  ~DeviceReplica() override;

  replica::Description describe() override { return network_->description(); }
  void bind(const session::Manifest& manifest, std::span<const replica::Place> places,
            replica::Sink& sink) override;
  void seed(std::uint64_t seed) override;
  void begin_attempt() override;
  void load_parameters() override;
  void run(std::span<const replica::Field> batch, double divisor) override;
  replica::Totals collect() override;
  void save(const replica::State& to) override;
  void load(const replica::ConstState& from) override;

 private:
  /// A micro-batch, copied into memory that this object owns.
  struct Work {
    std::vector<replica::Field> fields;
    std::vector<std::vector<std::byte>> memory;
    double divisor = 1;
  };

  void compute_until_end();
  void compute(const Work& work);
  /// Drops all queued and running micro-batches, and returns when the device thread is idle.
  void leave();
  bool idle() const { return !busy_ && works_.empty(); }

  std::unique_ptr<Network> network_;
  const session::Manifest* manifest_ = nullptr;
  replica::Sink* sink_ = nullptr;
  std::vector<replica::Place> master_;

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by the mutex.
  std::deque<Work> works_;
  bool busy_ = false, ending_ = false;
  std::exception_ptr failure_;
  // The device thread has these while it is busy; otherwise the runner's thread has them.
  std::vector<std::vector<std::byte>> sums_;  ///< Gradients of the attempt; empty if unused.
  replica::Totals totals_;

  std::thread device_;  ///< Started by bind(), as describe() alone needs none.
};

}  // namespace accelmgr::test
