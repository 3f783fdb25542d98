// Optimizers of the host, over flat groups of the master: one call of ATen's fused operators for each group.
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
/// are 1-d views of equal length, in the order of memory; for a transposed parameter that is not the order of
/// its shape. Both have one dtype, except with `gradients.dtype: float32`. Alignment gaps between tensors are
/// zero and stay zero.
struct FlatGroup {
  enum class Kind { decay, no_decay, frozen };
  Kind kind = Kind::decay;  ///< no_decay: fewer than two dimensions (norms, biases). frozen: requires_grad
                            ///< was false; its gradients are zeros without memory.
  at::Tensor parameters{};
  at::Tensor gradients{};
};

/// sgd, adam or adamw as configured, with warm-up, schedule and clipping. The results equal those of
/// libtorch's optimizers within rounding. One thread uses it; calls block only while they compute.
class Optimizer {
 public:
  /// `total_updates`: the update at which the cosine schedule ends. Frozen groups are never read or written.
  /// Throws ConfigError (nesterov without momentum, `steps_per_update` below 1), UsageError (a group that is
  /// not as FlatGroup says).
  Optimizer(const OptimizerConfig& config, std::vector<FlatGroup> groups, std::int64_t total_updates);
  ~Optimizer();

  /// Makes one update. The gradients hold the sum of `config.steps_per_update` mean gradients; dividing and
  /// clipping them may change them in place. Returns the L2 norm of the whole mean gradient before clipping,
  /// or NaN when `clip_norm` is 0 (the norm is not computed then). A norm that is not finite clips as torch's
  /// clip_grad_norm_ does: infinity makes every finite gradient 0, and NaN makes every parameter NaN. With
  /// `on_nonfinite: abort` the master never has such a gradient.
  double step();

  /// Number of updates made.
  std::int64_t updates() const noexcept;
  /// The learning rate of the next update.
  double learning_rate() const noexcept;

  /// The optimizer's own state, as views that follow its updates: `optimizer/<group>/momentum_buffer` (sgd
  /// with momentum) or `optimizer/<group>/exp_avg` and `exp_avg_sq` (adam, adamw), of the length and dtype of
  /// the group, and `optimizer/updates`, a 0-d int64. `<group>` is `decay` or `no_decay`; further groups of
  /// the same kind are `decay.2`, `decay.3`. All exist, as zeros, before the first update.
  std::vector<NamedTensor> state() const;

  /// Copies the state() of an optimizer with the same configuration and groups. Later updates equal those of
  /// that optimizer bit for bit. Throws ModelError, which names a tensor that is missing, unknown, given
  /// twice or of the wrong shape or dtype; nothing has changed then.
  void load_state(const std::vector<NamedTensor>& state);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The learning rate of update `update`, counted from 0, of `total_updates`. During warm-up it is (update +
/// 1) / warmup_updates of the full rate. After that it is constant, or follows half a cosine from the full
/// rate at update `warmup_updates` to `final_learning_rate_ratio` of it at the last update and after.
double scheduled_learning_rate(const OptimizerConfig& config, std::int64_t update,
                               std::int64_t total_updates);

}  // namespace accelmgr
