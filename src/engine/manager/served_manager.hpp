// A manager that no host has started: it owns a session, to which hosts attach one after the other.
#pragma once

#include <boost/asio/io_context.hpp>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "accelmgr/config.hpp"
#include "base/ipc/fork_server_client.hpp"
#include "base/unique_fd.hpp"
#include "engine/manager/checkpoint_writer.hpp"
#include "engine/manager/chosen_devices.hpp"
#include "engine/manager/lease.hpp"
#include "engine/manager/session_owner.hpp"
#include "engine/manager/supervisor.hpp"

namespace accelmgr::manager {

/// Used by the thread of its loop. It must live until the process ends by ipc::exit_with_group(), because its
/// threads use it.
class ServedManager {
 public:
  /// Forks the fork server, which closes `listeners`. Call it while the process has one thread, and before
  /// any code of the user has run. Throws ConfigError, SystemError.
  ServedManager(boost::asio::io_context& loop, const Config& config, std::span<const int> listeners);
  ServedManager(const ServedManager&) = delete;
  ServedManager& operator=(const ServedManager&) = delete;

  /// Creates the session, with the values of the checkpoint at `resume` (empty: those of the model), and
  /// starts the loader. Blocks. Throws as SessionOwner::make() does.
  void make_session(const std::string& resume);
  struct Events {
    std::function<void()> ready, gave_up;  ///< See Supervisor::start().
    std::function<void()> freed;           ///< This and the next one: see Lease::Events.
    std::function<void(const protocol::Saved&)> saved;
    std::function<void()> saves;  ///< `confine` of CheckpointWriter.
  };
  /// Starts the runners.
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

  /// Ends runners and fork server, and waits until `deadline` for checkpoints that are being written. Blocks:
  /// call it when the loop has ended.
  void stop(base::Deadline deadline);
  /// Ends them after an exception. Blocks.
  void abandon() noexcept;

 private:
  boost::asio::io_context& loop_;
  ChosenDevices chosen_;
  base::UniqueFd self_;  ///< The pidfd of this process: fork servers end with it, as they do with a host.
  std::optional<ipc::ForkServerClient> first_fork_server_;
  std::optional<SessionOwner> owner_;
  const data::Loader* loader_ = nullptr;
  std::optional<Lease> lease_;
  std::optional<CheckpointWriter> writer_;
  std::optional<Supervisor> supervisor_;
};

}  // namespace accelmgr::manager
