// A replica computed by libtorch on the CPU: an accelmgr::Model.
#pragma once

#include <memory>
#include <optional>

#include "accelmgr/config.hpp"
#include "accelmgr/model.hpp"
#include "engine/replica/replica.hpp"
#include "libtorch/handle/attempt_numbers.hpp"
#include "libtorch/handle/checked_model.hpp"
#include "libtorch/handle/gradient_hooks.hpp"

namespace accelmgr::libtorch {

/// Registers the factory of replicas, for registered models (accelmgr/model.hpp) and built-in ones. Returns
/// true.
bool register_replica();

class Replica final : public replica::Replica {
 public:
  Replica(const Config& config, std::unique_ptr<Model> model);

  replica::Description describe() override { return model_.describe(); }
  void bind(const replica::Binding& to) override;
  void seed(std::uint64_t seed) override;
  void begin_attempt() override;
  void run(std::span<const replica::Field> batch, double divisor) override;
  replica::Totals collect() override;
  void save(const replica::State& to) override;
  void load(const replica::ConstState& from) override;

 private:
  CheckedModel model_;
  std::optional<replica::Binding> binding_;
  std::optional<GradientHooks> hooks_;
  AttemptNumbers numbers_;
};

}  // namespace accelmgr::libtorch
