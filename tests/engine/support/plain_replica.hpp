// A replica of a Network in the host's memory. It reads parameters from the master's memory. run() computes a
// micro-batch and hands over its gradients before it returns.
#pragma once

#include <optional>

#include "engine/support/network.hpp"

namespace accelmgr::test {

class PlainReplica final : public replica::Replica {
 public:
  explicit PlainReplica(std::unique_ptr<Network> network) : network_(std::move(network)) {}

  replica::Description describe() override { return network_->description(); }
  void bind(const replica::Binding& to) override;
  void seed(std::uint64_t seed) override { network_->generator().seed(seed); }
  void begin_attempt() override { totals_ = {}; }
  void run(std::span<const replica::Field> batch, double divisor) override;
  replica::Totals collect() override { return totals_; }
  void save(const replica::State& to) override;
  void load(const replica::ConstState& from) override;

 private:
  std::unique_ptr<Network> network_;
  std::optional<replica::Binding> binding_;
  replica::Totals totals_;
};

/// save() and load() of any replica that holds a network.
void save_network(Network& network, const session::Manifest& manifest, const replica::State& to);
void load_network(Network& network, const session::Manifest& manifest, const replica::ConstState& from);
/// Adds the loss and the scalars of one micro-batch, divided by `divisor`.
void add_to(replica::Totals& totals, const Network::Output& output, double divisor);

}  // namespace accelmgr::test
