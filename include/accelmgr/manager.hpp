// The host's handle for its manager: starts it, steps it, reads gradients, writes parameters, stops it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "accelmgr/checkpoint.hpp"
#include "accelmgr/config.hpp"
#include "accelmgr/errors.hpp"
#include "accelmgr/named_tensor.hpp"
#include "accelmgr/optimizer.hpp"
#include "accelmgr/pending_steps.hpp"
#include "accelmgr/statistics.hpp"
#include "accelmgr/step_result.hpp"

namespace accelmgr {

struct StartOptions {
  /// Called every 20 ms. When it returns true, start() ends all processes that it started and throws
  /// SessionError.
  std::function<bool()> interrupted{};
  /// How the manager process is started. spawn: this program is executed again. forkserver: this program is
  /// executed again once, and that process forks this manager and all later ones of the host. fork: the host
  /// is forked, with its registered models and data sources. Locks that other threads hold then stay locked
  /// in the manager, and the manager does not replace a fork server that it loses.
  StartMethod method = StartMethod::spawn;
  /// Path and arguments of another program to run as the manager; the runners are forked from it, whatever
  /// `method` is. It makes the model and the data source. Example: a Python interpreter that runs
  /// accelmgr._process.child.main(), for models written in Python.
  std::vector<std::string> command{};
  /// Called once, before runners start, when the session has the initial parameters. The memory that the
  /// manager's model had for them may be freed here, before memory for gradients is allocated. The arguments
  /// are views as parameters() returns them; they stay valid when start() fails later. An exception ends
  /// start().
  std::function<void(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& gradients)>
      prepared{};
  /// true: start() locks `checkpoint.directory`; otherwise the first save_checkpoint() does. start() throws
  /// CheckpointError when the directory cannot be written, or another run uses it. Blocks up to 10 s longer
  /// while the manager of a killed run still writes to it.
  bool lock_checkpoints = false;
};

struct AttachOptions {
  std::string name{};       ///< How the service names this host to others. Empty: the name of this program.
  double timeout_s = 10.0;  ///< How long to wait while the service starts, or while another host is ending.
  std::function<bool()> interrupted{};  ///< Called every 20 ms. When it returns true, attach() throws.
  bool keep_gradients = false;  ///< The first step adds to left_gradients(); otherwise it overwrites them.
};

/// What the host adds to a checkpoint.
struct CheckpointExtras {
  std::optional<double> metric{};      ///< Lower is better; the checkpoint with the lowest value is kept.
  std::vector<NamedTensor> tensors{};  ///< Contiguous, on the CPU; for example Optimizer::state().
  std::string json = "{}";             ///< A JSON object, for the host's own use.
  /// Writes this checkpoint here, for use when `checkpoint.directory` fails. Removes no checkpoint there.
  /// Empty: `checkpoint.directory`.
  std::string directory{};
};

/// The checkpoint from which a manager resumed; after attach(), the service's last one.
struct Resumed {
  std::string path{};
  std::uint64_t step = 0;
  std::vector<NamedTensor> tensors{};  ///< Copies of CheckpointExtras::tensors.
  std::string json{};
  std::vector<std::string> refused{};  ///< Why each later checkpoint was not used.
  std::string run_id{};                ///< See Manager::run_id(). Empty: an earlier version wrote it.
  std::string configuration{};         ///< The writing run's configuration, as YAML. Empty: unknown.
  /// The step after which a host saved `tensors` and `json`. It is less than `step` if the service has made
  /// steps itself since then.
  std::uint64_t extras_step = 0;
};

/// Thread safety: one thread at a time. A call from a second thread while the handle is in use throws
/// UsageError at once. In a forked child of the host the handle is closed: every call throws UsageError, and
/// the parent's processes are not affected.
class Manager {
 public:
  /// Starts manager, fork server and runners. Blocks until all runners are ready, at most `start_timeout`.
  /// Throws UsageError (no init()), ConfigError, ModelError, DataError, SessionError (too little memory),
  /// RunnerError, CheckpointError (`checkpoint.resume`; see StartOptions::lock_checkpoints).
  static Manager start(const Config& config, const StartOptions& options = {});

  /// Becomes the host that drives the session of a service (`accelmgr serve`). `service` is the name of the
  /// session, or the path of its socket, which has a slash; empty: the service without a name. There is one
  /// such host at a time. The handle works as one that start() has made, with these differences:
  /// stop() and the destructor detach, and the service goes on; parameters and gradients are private copies
  /// then. kill() and recover() do not apply. A checkpoint has the service's run_id(), and resumed() has what
  /// the last host saved. Blocks for at most `timeout_s` and a second. Throws UsageError (no init()),
  /// ConfigError (neither a name nor a path), SessionError (no service, another host, another build).
  static Manager attach(const std::string& service, const AttachOptions& options = {});
  /// What an earlier host left half written when it ended, as a sentence; empty if nothing was. The
  /// parameters then have new values in part: write all of them, or go on with them as they are.
  const std::string& unfinished() const;
  /// Sets the parameters to what they were before the write that unfinished() names, if the service was
  /// started with `parameters.snapshot`. left_gradients() is about these parameters then. Throws UsageError:
  /// nothing is half written, there is no snapshot, or a step or a write is under way.
  void revert_parameters();
  /// Gradients of the last committed step that an earlier host, or the service, had left at attach(). Apply
  /// them if they are unapplied; the first step() overwrites them, unless AttachOptions::keep_gradients is
  /// true.
  LeftGradients left_gradients() const noexcept;

  Manager(Manager&&) noexcept;
  Manager& operator=(Manager&&) noexcept;
  /// Calls stop().
  ~Manager();

  /// Makes one step with all runners. Blocks until it is done, or its deadline has passed. The result reports
  /// the failures that a training loop must expect. Throws UsageError (also when requires_grad of a parameter
  /// was changed after the start), SessionError (closed), and what StepOptions::interrupted throws.
  ///
  /// With StepOptions::optimizer it is an inner step: runners reduce the gradients and update the parameters,
  /// each a slice, and the optimizer's state lies in the session. The update is part of the step: if any
  /// process is killed at any instruction, both count in full or not at all, and the next host of a service
  /// goes on with them. parameters() are the updated ones when this returns; gradients() are the mean, not
  /// clipped, and the next step overwrites them. With `steps_per_update` n the session updates in each n-th
  /// step that counts, and adds up the gradients until then. Learning rate, clipping and the like may differ
  /// from step to step; if the kind of optimizer changes, its state begins with zeros. The numbers are those
  /// of Optimizer within rounding. Throws SessionError (too little memory for the state), ConfigError,
  /// UsageError (trained parameters that share memory without being the same).
  StepResult step(const StepOptions& options = {});

  /// Begins `n` inner steps, with StepOptions::optimizer, and returns at once: a thread makes them, as n
  /// calls of step() would, and ends at the first one that is not ok. The n steps share `options`. If a
  /// service owns the session, it makes them, and they go on when this process ends or detaches. Until they
  /// are over, other calls that step, write or change the session throw UsageError; stop() cancels them
  /// unless a service makes them. Parameters change meanwhile: read them when the steps are over. Throws as
  /// step(), SystemError, SessionError (the service refuses).
  PendingSteps begin_steps(int n, const StepOptions& options);
  /// The steps that begin_steps() has begun last. After attach(): the steps that an earlier host of the
  /// service has begun, if no other step was made since; until they are over, step() throws UsageError.
  /// Empty: there are none. Throws SystemError.
  std::optional<PendingSteps> pending_steps();

  /// Updates that inner steps have made.
  std::int64_t updates() const noexcept;
  /// The optimizer's state for inner steps, as Optimizer::state() has it: views that follow its updates.
  /// Before the first inner step it has `optimizer/updates` only.
  std::vector<NamedTensor> optimizer_state() const;
  /// Copies a state that Optimizer::state() or optimizer_state() has given, of the same model and
  /// configuration: the next inner step goes on from there. Throws as Optimizer::load_state(), SessionError
  /// (too little memory), UsageError (during a step).
  void load_optimizer_state(const OptimizerConfig& config, const std::vector<NamedTensor>& state);

  /// Zeroes the master gradients.
  void zero_grad();

  /// The master parameters in the model's order, each once (tied weights under their first name). Views of
  /// the session; their addresses never change. Write to them only between steps.
  const std::vector<NamedTensor>& parameters() const;
  /// The master gradients, in the order of parameters(). Views; always defined, zero for unused parameters.
  /// They have the parameter's dtype; with `gradients.dtype: float32` a 16-bit parameter's gradient is
  /// float32, and its `.grad` is undefined. A frozen parameter has zeros without memory: nobody reads what is
  /// written there.
  const std::vector<NamedTensor>& gradients() const;
  /// Whether committed steps have given each parameter a gradient since zero_grad(), in the order of
  /// parameters(). An optimizer that decays weights or has momentum leaves the others alone, as torch::optim
  /// does where `.grad` is undefined. After attach(), and after a start that resumed: whether its gradient is
  /// not zero.
  std::vector<bool> touched() const;
  /// Views of the same memory as flat, contiguous tensors, grouped by how an optimizer treats them and by
  /// dtype. Throws ModelError if different parameters share memory.
  const std::vector<FlatGroup>& groups() const;
  /// Copies of the buffers of the last committed step, combined by `buffers.policy`.
  std::vector<NamedTensor> buffers() const;
  /// Copies of parameters and persistent buffers. A tensor with several names is listed under each.
  std::vector<NamedTensor> state_dict() const;

  /// A scope for writing parameters in place. If the host dies inside, the version in the session marks the
  /// parameters as unfinished, and no runner computes with them.
  class Writing {
   public:
    explicit Writing(Manager& manager);
    ~Writing();
    Writing(const Writing&) = delete;
    Writing& operator=(const Writing&) = delete;

   private:
    Manager& manager_;
    int exceptions_;  ///< Exceptions under way at the start. A write that a new one ends does not count as
                      ///< whole.
  };
  Writing writing() { return Writing(*this); }

  /// Replaces all parameters; `values` is in the order of parameters(). Checks count, shapes and dtypes
  /// before it writes: if it throws ModelError, nothing has changed.
  void update_model_parameters(std::span<const at::Tensor> values);

  /// Replaces some of buffers(), by name, in all runners from the next step on. Checks names, shapes and
  /// dtypes before it writes: if it throws ModelError, nothing has changed. Throws UsageError during a step.
  void update_buffers(const std::vector<NamedTensor>& values);

  /// Makes the ranks 0 to `runners` - 1 the team, from the next step on. Blocks until they are ready, at most
  /// `start_timeout`. Elements that were assigned but not consumed are assigned again, in order. Throws
  /// UsageError (`runners` is not 1 to `runners.max_runners`), SessionError (too little memory; nothing has
  /// changed), RunnerError (a new runner fails repeatedly).
  void resize(int runners);

  /// Call it after a step returned `manager_lost`. Starts a new manager over the same session. Gradients,
  /// parameters, buffers, generators and the data cursor are those of the last committed step; training
  /// continues from there. Blocks and throws as start() does. Throws UsageError when no manager was lost; it
  /// waits some seconds for one that was killed just now to end.
  void recover();

  /// Copies the state of training (parameters, gradients, buffers, generators, counters, data cursor, and
  /// `extras`) to a staging area, and returns. The manager writes it into `checkpoint.directory` in the
  /// background. Returns how long the call blocked, in ms; it waits while an earlier checkpoint is being
  /// written. The first call locks the directory until stop(). Throws CheckpointError (a dtype that a
  /// checkpoint cannot hold; `checkpoint.directory` is locked by another run, or has checkpoints of another
  /// run, which this one would replace), SessionError (too little memory, manager lost), UsageError (no
  /// directory). stop() waits only a few seconds for the writing, and warns of what was not
  /// written then: call checkpoints_written() before it.
  double save_checkpoint(const CheckpointExtras& extras = {});
  /// Whether a client of the service has asked for a checkpoint since the last save_checkpoint(). A host
  /// looks between its steps, so that the checkpoint has its optimizer. Reads one word of memory. Always
  /// false for a manager that is no service.
  bool checkpoint_requested() const;
  /// The checkpoints that were written, or failed, since the last call. Waits at most `wait_s` for the one in
  /// progress.
  std::vector<CheckpointWritten> checkpoints_written(double wait_s = 0);
  /// The checkpoint from which start() resumed (`checkpoint.resume`); empty for a new run. After attach():
  /// the service's last checkpoint, if a host's state is in it; the first call reads it. Throws
  /// CheckpointError.
  const std::optional<Resumed>& resumed() const;
  /// 16 hexadecimal digits. Checkpoints hold them, so all runs that resume from this one have the same id.
  const std::string& run_id() const;

  Statistics statistics() const;
  const Config& config() const;

  /// Ends runners, fork server and manager: SIGTERM, then SIGKILL. Blocks for a bounded time. Gradients and
  /// parameters stay readable. Idempotent.
  void stop();
  /// Kills runners, fork server and manager at once. Async-signal-safe.
  void kill() noexcept;

 private:
  std::vector<NamedTensor> optimizer_state(int moments) const;
  struct State;
  explicit Manager(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace accelmgr
