// The handle of a host on its manager: start it, step it, read gradients, write parameters, stop it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
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
  std::optional<double> timeout_s{};  ///< 0 or more; default: `step_timeout` of the configuration.
  bool accumulate = true;             ///< false: the master gradients are overwritten; nothing needs zeroing.
  bool parameters_changed = true;  ///< false: the host knows that it wrote no parameter since the last step.
  /// Asked every 20 ms while the step is not committed, and after a signal: true ends it as a timeout does.
  std::function<bool()> interrupted{};
};

struct StartOptions {
  /// Asked every 20 ms: true ends all that was started, and start() throws SessionError.
  std::function<bool()> interrupted{};
  /// How the manager process comes to be. spawn: this program is run again. forkserver: it is run again once,
  /// and forked for this manager and all later ones of this process. fork: the manager is a fork of this
  /// process, with all that is registered here by then; what other threads hold locked stays locked in it,
  /// and a launcher that it loses is not replaced.
  StartMethod method = StartMethod::spawn;
  /// Called once, before there are runners: from here on the session has the initial parameters, and whatever
  /// the model in the manager took them from may be given back before the gradients get their memory. Views,
  /// as parameters() returns them; they outlive a start() that fails later. What it throws ends start().
  std::function<void(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& gradients)>
      prepared{};
  /// Locks `checkpoint.directory` for this run at once, not at its first save_checkpoint(): start() throws
  /// CheckpointError when it cannot be written, or another run uses it. Blocks up to 10 s longer where the
  /// manager of a killed run still writes to it.
  bool lock_checkpoints = false;
};

/// What the host adds to a checkpoint.
struct CheckpointExtras {
  std::optional<double> metric{};      ///< Of which the lowest is the best checkpoint, which is kept.
  std::vector<NamedTensor> tensors{};  ///< Dense, on the CPU; Optimizer::state().
  std::string json = "{}";             ///< An object, for the host's own use.
  /// Where this one is written instead of `checkpoint.directory`, when that fails; no other is removed there.
  std::string directory{};
};

/// What became of a checkpoint.
struct CheckpointWritten {
  std::uint64_t step = 0;
  std::string path{};
  std::uint64_t bytes = 0;
  double copy_ms = 0;   ///< How long the host was held up.
  double write_ms = 0;  ///< How long the manager took meanwhile.
  std::string error{};  ///< Empty when it has reached the disk.
  std::vector<std::string> warnings{};
};

/// The checkpoint that a manager went on from.
struct Resumed {
  std::string path{};
  std::uint64_t step = 0;
  std::vector<NamedTensor> tensors{};  ///< As CheckpointExtras gave them; copies.
  std::string json{};
  std::vector<std::string> refused{};  ///< Later ones, and why they were not taken.
  std::string run_id{};                ///< See Manager::run_id(); empty: an earlier version wrote it.
  std::string configuration{};         ///< As YAML, of the run that wrote it; empty: not known.
};

struct RunnerStatistics {
  int rank = 0;
  int pid = 0;                          ///< 0 while it is being replaced.
  std::uint32_t generation = 0;         ///< Processes of this rank so far.
  std::string phase{};                  ///< init, waiting, forward, backward, vote, reduce, ...
  std::uint64_t attempt = 0;            ///< The last it took part in.
  std::uint64_t samples = 0;            ///< In all committed steps.
  std::uint64_t peak_memory_bytes = 0;  ///< VmHWM.
  double start_ms = 0;                  ///< From the fork of its process until it was ready.
  double model_ms = 0;                  ///< Of that, building the model.
};

struct Statistics {
  std::uint64_t steps = 0;  ///< Committed.
  std::uint64_t attempts = 0;
  std::uint64_t samples = 0;   ///< In all committed steps.
  std::uint64_t elements = 0;  ///< Of the data source, that were consumed: `samples`, and what was skipped.
  std::uint64_t skips = 0;     ///< Attempts whose batches were left out (`on_nonfinite: skip_batch`).
  std::uint64_t replacements = 0;  ///< Runners that were started in the place of lost ones.
  std::uint64_t losses = 0;        ///< Runners and launchers that were lost.
  std::uint64_t parameter_version = 0;
  std::uint64_t session_bytes = 0;  ///< Shared memory of the session.
  int manager_pid = 0;
  std::uint64_t manager_peak_memory_bytes = 0;  ///< VmHWM.
  std::vector<RunnerStatistics> runners{};      ///< The team, by rank.
};

/// Thread safety: one thread at a time. A second thread that calls into a handle in use gets UsageError at
/// once. In a child that the host forks, the handle is closed: every call throws UsageError, and nothing of
/// the parent's ends.
class Manager {
 public:
  /// Starts manager, launcher and runners; returns when all runners are ready. Blocks for at most
  /// `start_timeout`. Throws UsageError (no init()), ConfigError, ModelError, DataError, SessionError
  /// (memory), RunnerError, CheckpointError (`checkpoint.resume`; see StartOptions::lock_checkpoints).
  static Manager start(const Config& config, const StartOptions& options = {});

  Manager(Manager&&) noexcept;
  Manager& operator=(Manager&&) noexcept;
  /// Stops, as stop() does.
  ~Manager();

  /// One step of all runners. Blocks until it is done, or its deadline has passed. Failures of a training
  /// loop are in the result; throws only UsageError (also for requires_grad of a parameter that was changed
  /// after the start) and SessionError (closed).
  StepResult step(const StepOptions& options = {});

  /// Zeroes the master gradients.
  void zero_grad();

  /// The master parameters in the model's order, each once (tied weights under their first name). Views of
  /// the session: their addresses never change. Write to them only between steps.
  const std::vector<NamedTensor>& parameters() const;
  /// The master gradients, in the order of parameters(). Views; never undefined, zero for frozen or unused
  /// parameters.
  const std::vector<NamedTensor>& gradients() const;
  /// The same memory as flat, contiguous tensors, by how an optimizer treats them. Throws ModelError for
  /// parameters that share memory without being one parameter.
  const std::vector<FlatGroup>& groups() const;
  /// Buffers of the last committed step, by `buffers.policy`. Copies.
  std::vector<NamedTensor> buffers() const;
  /// Parameters and persistent buffers by name; what has several names under each of them. Copies.
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

  /// Replaces some of buffers(), by name, in all runners from the next step on. Names, shapes and dtypes are
  /// checked before anything is written; throws ModelError, and nothing has changed then; UsageError during a
  /// step.
  void update_buffers(const std::vector<NamedTensor>& values);

  /// Makes the ranks 0 to `runners` - 1 the team, from the next step on. Blocks until they are ready, at most
  /// `start_timeout`. What was dealt and not consumed is dealt anew, in order. Throws UsageError (not 1 to
  /// `runners.max_runners`), SessionError (memory; nothing has changed then), RunnerError (a new runner fails
  /// again and again).
  void resize(int runners);

  /// After a step returned `manager_lost`: starts a new manager over the same session. Gradients, parameters,
  /// buffers, generators and the data cursor are those of the last committed step, and training goes on as if
  /// nothing had happened. Blocks and throws as start() does; UsageError when no manager was lost: a manager
  /// that was killed just now is given 2 s to end.
  void recover();

  /// Copies all that training goes on from (parameters, gradients, buffers, generators, counters, data
  /// cursor, and the extras) to a staging area, from which the manager writes it into `checkpoint.directory`;
  /// returns how long that held up the caller, in ms. Waits for an earlier checkpoint that is still being
  /// written. The first locks the directory until stop(). Throws CheckpointError (a dtype that a checkpoint
  /// cannot hold; `checkpoint.directory` is locked by another run, or holds checkpoints of one, which this
  /// one would replace), SessionError (memory, manager lost), UsageError (no directory). stop() waits for the
  /// writing a few seconds at most: before it, wait in checkpoints_written().
  double save_checkpoint(const CheckpointExtras& extras = {});
  /// The checkpoints that were written, or could not be, since the last call. Waits for those under way at
  /// most `wait_s`.
  std::vector<CheckpointWritten> checkpoints_written(double wait_s = 0);
  /// What start() went on from (`checkpoint.resume`); empty for a new run.
  const std::optional<Resumed>& resumed() const;
  /// Of this run and of all that go on from its checkpoints, which hold it; 16 hexadecimal digits.
  const std::string& run_id() const;

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
