// Binds a replica to memory of the test, as a runner binds one to a session.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <vector>

#include "engine/replica/replica.hpp"
#include "engine/support/runner_side.hpp"

namespace accelmgr::test {

/// Collects the gradients that a replica hands over: a sum for each parameter, by its index.
class GradientSums final : public RunnerSide {
 public:
  void capture(std::size_t index, const void* gradient) override;
  void backward_begins() override {}
  bool wanted() override { return true; }

  const session::Manifest* manifest = nullptr;
  DType dtype = DType::float32;
  std::map<std::size_t, std::vector<double>> sums;
};

class BoundReplica {
 public:
  /// Seeds the replica's generator with `seed`.
  BoundReplica(std::unique_ptr<replica::Replica> replica, std::uint64_t seed);

  replica::Replica& replica() { return *replica_; }
  GradientSums& sink() { return sink_; }
  /// The place of a parameter in the master.
  const replica::Place& place(std::size_t parameter) const { return places_[parameter]; }
  /// All buffers, as the last save() wrote them.
  const std::vector<std::byte>& saved_buffers() const { return buffers_; }

  void save() { replica_->save({buffers_.data(), generator_}); }
  void begin_attempt();

 private:
  std::byte* pages(std::size_t bytes);

  std::vector<std::vector<std::byte>> memory_;
  std::vector<std::byte> buffers_, generator_;
  session::Manifest manifest_;
  std::vector<replica::Place> places_;
  GradientSums sink_;
  std::unique_ptr<replica::Replica> replica_;  ///< Destroyed first, because it uses all members above.
};

}  // namespace accelmgr::test
