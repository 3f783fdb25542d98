// The manager: it owns a session, loads its data, supervises its runners, and lets hosts drive it. What
// differs between the one of a host and that of a service follows from its Tenure (protocol/messages.hpp).
#pragma once

#include <boost/asio/io_context.hpp>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "base/ipc/fork_server_client.hpp"
#include "base/unique_fd.hpp"
#include "base/unmovable.hpp"
#include "engine/manager/checkpoint_writer.hpp"
#include "engine/manager/chosen_devices.hpp"
#include "engine/manager/lease.hpp"
#include "engine/manager/session_owner.hpp"
#include "engine/manager/supervisor.hpp"

namespace accelmgr::manager {

/// Where the models and the data of a manager are.
enum class Image {
  executed,  ///< In the program: a fork server that is lost is executed anew.
  forked,    ///< In this fork of the host alone: the host must fork another manager.
};

/// Runs the manager that a host has started, until the process ends. Call before it starts threads. `socket`
/// leads to the host. If `host_pidfd` is empty, the pidfd is obtained from the socket.
[[noreturn]] void run(base::UniqueFd socket, base::UniqueFd host_pidfd = {}, Image image = Image::executed);

/// Used by the thread of its loop. It must live until the process ends by _exit(), because its threads use
/// it.
class Manager : base::Unmovable {
 public:
  struct Origin {
    Tenure tenure = Tenure::of_host;
    int ends_with = -1;  ///< The pidfd of the process with which fork servers end: the host, or this one.
    Image image = Image::executed;
  };
  /// Forks the fork server, which closes `not_for_runners`. Call it while the process has one thread, and
  /// before any code of the user has run. Throws SystemError.
  Manager(boost::asio::io_context& loop, ChosenDevices chosen, Origin origin,
          std::vector<int> not_for_runners);

  /// Creates the session, with the values of the checkpoint at `resume` (empty: those of the model), and
  /// starts the loader. Blocks. Throws as SessionOwner::make() does.
  void make_session(const std::string& resume, const SessionOwner::Prepared& prepared);
  /// Goes on with the session of an earlier manager, and claims its GPUs. reads_again: see data::Loading.
  /// Throws as SessionOwner::take_over() does.
  void take_over(std::vector<base::UniqueFd> session, bool reads_again);

  struct Events {
    std::function<void()> ready, gave_up;  ///< See Supervisor::start().
    std::function<void()> freed;           ///< This and the next one: see Lease::Events.
    std::function<void(const protocol::Saved&)> saved;
    std::function<void()> saves;  ///< `confine` of CheckpointWriter.
  };
  /// Starts the runners. From now on there is a lease.
  void start(Events events);

  /// With the devices that were chosen.
  const Config& config() const noexcept { return chosen_.config; }
  /// Changes what the supervisor goes by. No thread may drive the session meanwhile.
  void change(const std::function<void(Config&)>& change) {
    change(chosen_.config);
    supervisor_->config_changed();
  }
  const session::Session& session() const noexcept { return owner_->session(); }
  session::SupervisorView view() const noexcept { return owner_->view(); }
  session::HostView host_view() const noexcept { return owner_->host_view(); }
  const session::Manifest& manifest() const noexcept { return owner_->manifest(); }
  Supervisor& supervisor() noexcept { return *supervisor_; }
  Lease& lease() noexcept { return *lease_; }
  /// See CheckpointWriter::last().
  std::shared_ptr<const checkpoint::HostFiles> last_checkpoint() const { return writer_->last(); }

  /// Ends fork server and runners within `runners_s`, then waits for checkpoints that are being written until
  /// `gives_up`, which is asked again and again. Blocks: call it when the loop has ended.
  void stop(double runners_s, const std::function<bool()>& gives_up);
  /// Ends them after an exception. Blocks.
  void abandon() noexcept;

 private:
  void begin_session(SessionOwner owner, bool reads_again = false);

  boost::asio::io_context& loop_;
  ChosenDevices chosen_;
  Origin origin_;
  std::optional<ipc::ForkServerClient> first_fork_server_;
  std::optional<SessionOwner> owner_;
  const data::Loader* loader_ = nullptr;
  std::optional<Lease> lease_;
  std::optional<CheckpointWriter> writer_;
  std::optional<Supervisor> supervisor_;
};

}  // namespace accelmgr::manager
