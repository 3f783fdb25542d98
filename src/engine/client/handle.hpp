// The host's side of a manager, without tensors of any library. accelmgr::Manager (libtorch) and the Python
// package are built on it: they put tensors over the memory of the session, and check their arguments.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "accelmgr/checkpoint.hpp"
#include "accelmgr/config.hpp"
#include "accelmgr/statistics.hpp"
#include "accelmgr/step_result.hpp"
#include "engine/client/service_steps.hpp"
#include "engine/client/step_kind.hpp"
#include "engine/client/values.hpp"
#include "engine/session/manifest.hpp"
#include "engine/session/session.hpp"
#include "engine/session/views.hpp"

namespace accelmgr::client {

/// See StartOptions. The start asks base::interrupted().
struct StartSettings {
  StartMethod method = StartMethod::spawn;
  std::vector<std::string> command{};
  /// `needs_values`: the host is to write the parameters, whose memory is allocated then.
  std::function<void(std::shared_ptr<const session::Session>, const session::HostView&,
                     const session::Manifest&, bool needs_values)>
      prepared{};
  bool lock_checkpoints = false;
  std::string continues{};  ///< If not empty, what Handle::continuation() of an earlier manager returned.
};

/// See AttachOptions. The wait asks base::interrupted().
struct AttachSettings {
  std::string name{};
  double timeout_s = 10.0;
  bool keep_gradients = false;
};

/// Which parameters a host writes. After `trained` devices need not copy the frozen ones anew.
enum class Written { all, trained };

/// Members that accelmgr::Manager has too block and throw as they do there. One thread at a time: a call
/// during another throws UsageError. In a forked child of the host it is closed: step() and the like throw
/// UsageError, and kill() and the destructor do nothing.
class Handle {
 public:
  /// Starts a manager. Blocks and throws as Manager::start() does.
  Handle(const Config& config, const StartSettings& settings);
  /// Attaches to a service. Blocks and throws as Manager::attach() does.
  Handle(const std::string& path, const AttachSettings& settings);
  Handle(Handle&&) noexcept;
  Handle& operator=(Handle&&) noexcept;
  ~Handle();

  /// The session stays mapped as long as a copy of this pointer exists.
  std::shared_ptr<const session::Session> session() const;
  /// Valid while the session is mapped.
  const session::HostView& view() const;
  const session::Manifest& manifest() const;
  const Config& config() const;
  /// See Manager::unfinished().
  const std::string& unfinished() const;
  /// See Manager::left_gradients().
  LeftGradients left_gradients() const noexcept;
  /// Whether the next step overwrites gradients, whatever its options say.
  bool overwrites_next() const noexcept;

  StepResult step(const StepOptions& options = {}, StepKind kind = StepKind::outer);
  /// A step whose update the session makes, if it is the last of the `divisor` steps whose gradients are
  /// added. Blocks and throws as step() does, and as clear_moments(), which it calls for another kind of
  /// optimizer; throws UsageError if trained parameters share memory. See set_update().
  StepResult step(const StepOptions& options, const session::Update& update);
  /// Of a host of a service: lets the service make `count` inner steps, also if this process ends meanwhile.
  /// Until they are over, calls that step, write or change the session throw UsageError. Throws as step()
  /// does, SessionError (the service refuses), and UsageError when this process has started the manager
  /// itself.
  void begin_service_steps(int count, const StepOptions& options, const session::Update& update);
  /// The steps that this host has begun, or that it found when it attached. Any thread. Throws SessionError.
  ServiceSteps service_steps(std::size_t known) const;
  /// Ends the steps. Blocks while one is under way, at most `step_timeout`. Any thread. Throws SessionError.
  void cancel_service_steps() const;
  /// How many steps attach() found begun by an earlier host or a client. They may be under way. 0: none.
  int found_steps() const noexcept;
  bool is_attached() const noexcept;
  /// Throws UsageError, with the name of the call, while the service makes such steps. Asks the service then.
  void check_drives(const char* call) const;
  /// How many updates a parameter has had, by its number in the manifest.
  std::uint64_t updates(std::size_t parameter) const noexcept;
  /// Sets the group of a parameter in Update, and how many updates its moments have had.
  /// Requires: no attempt is open.
  void set_update(std::size_t parameter, std::uint64_t group, std::uint64_t updates) noexcept;
  /// Makes room for moments, which lie in HostView::moments() as zeros; no parameter has had an update then.
  /// Until use_moments() there is no state that another host goes on with. Throws SessionError (too little
  /// memory), UsageError (during a step).
  void clear_moments(session::Moments moments);
  void use_moments(session::Moments moments) noexcept;
  /// Whether the last committed step has updated the parameters in the session.
  bool is_updated() const noexcept;
  void zero_grad();
  /// Between two steps, lets the replica of `rank` run Replica::call(), which knows what to call. Blocks
  /// for at most `step_timeout`. Throws RunnerError when a runner is lost, SessionError after the timeout.
  void call(int rank);
  /// See Manager::touched().
  std::vector<bool> touched() const;
  /// Records of some parameters, by their numbers in the manifest, that the host has given them a gradient or
  /// zeroed it.
  void set_touched(std::span<const std::size_t> parameters, bool touched);
  /// Frozen parameters were written: devices copy them again for the next step.
  void frozen_written();
  /// Makes gradients for parameters that were frozen at the start, by their numbers in the manifest: from the
  /// next step on they are trained. Those that have one already stay as they are. Throws UsageError (during a
  /// step; a parameter whose dtype cannot be trained), SessionError (too little memory; nothing has changed).
  void unfreeze(std::span<const std::size_t> parameters);
  /// Call these two around writes to parameters. begin_writing() throws UsageError inside another pair, and
  /// while an attempt is open. `written`: see there. `whole`: the caller vouches that no parameter is half
  /// written any more.
  void begin_writing(Written written = Written::all);
  void end_writing(bool whole = true) noexcept;
  bool is_writing() const noexcept;
  /// See Manager::revert_parameters().
  void revert_parameters();

  /// Buffers of the last committed step, without those that are not the model's. Views: the next step
  /// overwrites them.
  std::vector<Value> buffers() const;
  /// Replaces some buffers, by any of their names. Throws ModelError when there is no such
  /// buffer or its dtype or shape differs: then no buffer has changed. Throws UsageError during a step.
  void update_buffers(std::span<const Value> values);

  void resize(int runners);
  void recover();
  /// Ends the processes of this manager, and starts others over the same session, as recover() does: with the
  /// start method `fork` they are forks of this process as it is now. A checkpoint that is being written is
  /// finished first, and elements that were read ahead are read again. Blocks and throws as recover() does;
  /// throws UsageError during a step.
  void refresh();
  /// Whether the fork server has ended, and with it all runners.
  bool fork_server_ended() const noexcept;
  double save_checkpoint(const Extras& extras);
  bool checkpoint_requested() const noexcept;
  std::vector<CheckpointWritten> checkpoints_written(double wait_s);
  const std::optional<ResumedFrom>& resumed() const;
  const std::string& run_id() const;
  /// For another manager, of a model with other parameters, that goes on where this one stands after stop():
  /// its run, counters, position in the data and generators, as JSON.
  std::string continuation() const;
  Statistics statistics(bool memory = true) const;  ///< statistics_of().
  void stop();
  void kill() noexcept;

  /// Children that this process forks share the session's memory with it from now on. Otherwise they have the
  /// pages that they write for themselves.
  void share_with_children();
  /// Until release(), calls of other threads throw UsageError, also between those of this one. Nests. Throws
  /// UsageError, with the name of the call, when another thread uses this.
  void claim(const char* call);
  void release() noexcept;
  /// The calling thread has the claim of another one, which does not use this meanwhile.
  void take_claim() noexcept;

  /// Throws UsageError, with the name of the call, in any process but the one that started this.
  void check_owner(const char* call) const;

 private:
  void prepare_update(const session::Update& update);
  StepResult make_step(const StepOptions& options, StepKind kind, const session::Update* update);
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace accelmgr::client
