// Host optimizers over the flat master: ATen's fused operators, one call per group.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "accelmgr/named_tensor.hpp"

namespace accelmgr {

/// A contiguous piece of the master whose parameters an optimizer treats alike. `parameters` and `gradients`
/// are 1-d views of equal length, whose gaps between tensors (alignment) are zero and stay zero.
struct FlatGroup {
  enum class Kind { decay, no_decay, frozen };
  Kind kind =
      Kind::decay;  ///< no_decay: fewer than two dimensions (norms, biases). frozen: requires_grad was false.
  at::Tensor parameters{};
  at::Tensor gradients{};
};

/// sgd, adam or adamw as configured, with warm-up, schedule and clipping. Equal to libtorch's own within
/// rounding. Used by one thread; blocks for the arithmetic alone.
class Optimizer {
 public:
  /// `total_updates`: where the cosine schedule ends. Throws ConfigError (nesterov without momentum),
  /// UsageError (a group whose tensors are not as FlatGroup says). Frozen groups are never read or written.
  Optimizer(const OptimizerConfig& config, std::vector<FlatGroup> groups, std::int64_t total_updates);
  ~Optimizer();

  /// One update from the gradients, which hold the sum of `config.steps_per_update` mean gradients. Clipping
  /// and that division may change the gradients in place. Returns the L2 norm of the whole mean gradient
  /// before clipping, or NaN when `clip_norm` is 0 (it is not computed then). A norm that is not finite clips
  /// as torch's clip_grad_norm_ does: infinity makes every finite gradient 0, and NaN reaches every
  /// parameter. Under `on_nonfinite: abort` no such gradient is in the master.
  double step();

  /// Updates done.
  std::int64_t updates() const noexcept;
  /// The learning rate of the next update.
  double learning_rate() const noexcept;

  /// What the next updates depend on besides parameters, gradients and configuration: views of the
  /// optimizer's own tensors, which follow its updates. `optimizer/<group>/momentum_buffer` (sgd with
  /// momentum) or `optimizer/<group>/exp_avg` and `exp_avg_sq` (adam, adamw), of the length and dtype of the
  /// group, and `optimizer/updates`, an int64 without dimensions. `<group>` is `decay` or `no_decay`; further
  /// groups of the same kind are `decay.2`, `decay.3`. All are there, as zeros, before the first update.
  std::vector<NamedTensor> state() const;

  /// Copies what state() of an optimizer with the same configuration and groups gave: updates go on as that
  /// one's would have, bit for bit. Throws ModelError that names the tensor which is missing, unknown, given
  /// twice or not of the shape and dtype needed; then nothing is changed.
  void load_state(const std::vector<NamedTensor>& state);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The learning rate of update `update` (from 0) of `total_updates`. Warm-up: (update + 1) / warmup_updates
/// of the full rate; then constant, or half a cosine from the full rate at update `warmup_updates` to
/// `final_learning_rate_ratio` of it at the last update (and after).
double scheduled_learning_rate(const OptimizerConfig& config, std::int64_t update,
                               std::int64_t total_updates);

}  // namespace accelmgr
