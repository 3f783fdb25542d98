// The handle of a host on its manager: start it, step it, read gradients, write parameters, stop it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "accelmgr/errors.hpp"
#include "accelmgr/named_tensor.hpp"
#include "accelmgr/optimizer.hpp"
#include "accelmgr/step_result.hpp"

namespace accelmgr {

struct StepOptions {
  std::optional<double> timeout_s{};  ///< Default: `step_timeout` of the configuration.
  bool accumulate = true;             ///< false: the master gradients are overwritten; nothing needs zeroing.
  bool parameters_changed = true;  ///< false: the host knows that it wrote no parameter since the last step.
};

struct RunnerStatistics {
  int rank = 0;
  int pid = 0;
  std::string phase;                    ///< init, waiting, forward, backward, vote, reduce, ...
  std::uint64_t attempt = 0;            ///< The last it took part in.
  std::uint64_t samples = 0;            ///< In all committed steps.
  std::uint64_t peak_memory_bytes = 0;  ///< VmHWM.
};

struct Statistics {
  std::uint64_t steps = 0;  ///< Committed.
  std::uint64_t attempts = 0;
  std::uint64_t samples = 0;  ///< In all committed steps.
  std::uint64_t parameter_version = 0;
  std::uint64_t session_bytes = 0;  ///< Shared memory of the session.
  int manager_pid = 0;
  std::uint64_t manager_peak_memory_bytes = 0;  ///< VmHWM.
  std::vector<RunnerStatistics> runners;
};

/// Thread safety: one thread at a time. A second thread that calls into a handle in use gets UsageError at
/// once. In a child that the host forks, the handle is closed: every call throws UsageError, and nothing of
/// the parent's ends.
class Manager {
 public:
  /// Starts manager, launcher and runners; returns when all runners are ready. Blocks for at most
  /// `start_timeout`. Throws UsageError (no init()), ConfigError, ModelError, DataError, SessionError
  /// (memory), RunnerError.
  static Manager start(const Config& config);

  Manager(Manager&&) noexcept;
  Manager& operator=(Manager&&) noexcept;
  /// Stops, as stop() does.
  ~Manager();

  /// One step of all runners. Blocks until it is done, or its deadline has passed. Failures of a training
  /// loop are in the result; throws only UsageError and SessionError (closed).
  StepResult step(const StepOptions& options = {});

  /// Zeroes the master gradients.
  void zero_grad();

  /// The master parameters in the model's order, each once (tied weights under their first name). Views of
  /// the session: their addresses never change. Write to them only between steps.
  const std::vector<NamedTensor>& parameters() const;
  /// The master gradients, in the order of parameters(). Views; never undefined, zero for frozen or unused
  /// parameters.
  const std::vector<NamedTensor>& gradients() const;
  /// The same memory as flat, contiguous tensors, by how an optimizer treats them.
  const std::vector<FlatGroup>& groups() const;
  /// Buffers of the last committed step, by `buffers.policy`. Copies.
  std::vector<NamedTensor> buffers() const;
  /// Parameters and buffers by name; tied weights under each of their names. Copies.
  std::vector<NamedTensor> state_dict() const;

  /// Brackets writes in place: a host that dies inside leaves a version that says so, and no runner computes
  /// with half of it.
  class Writing {
   public:
    explicit Writing(Manager& manager);
    ~Writing();
    Writing(const Writing&) = delete;
    Writing& operator=(const Writing&) = delete;

   private:
    Manager& manager_;
  };
  Writing writing() { return Writing(*this); }

  /// Replaces all parameters, in the order of parameters(). Count, shapes and dtypes are checked before
  /// anything is written; throws ModelError, and nothing has changed then.
  void update_model_parameters(std::span<const at::Tensor> values);

  Statistics statistics() const;
  const Config& config() const;

  /// Ends runners, launcher and manager; bounded (TERM, then KILL). Gradients and parameters stay readable.
  /// Idempotent.
  void stop();
  /// Kills runners, launcher and manager at once. Async-signal-safe.
  void kill() noexcept;

 private:
  struct State;
  explicit Manager(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace accelmgr
