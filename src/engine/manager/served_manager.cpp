#include "engine/manager/served_manager.hpp"

#include <unistd.h>

#include <utility>

#include "base/config/faults.hpp"
#include "base/ipc/process.hpp"
#include "base/ipc/user_forks.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"
#include "engine/manager/chosen_devices.hpp"
#include "engine/manager/fork_servers.hpp"
#include "engine/manager/interpreter.hpp"

namespace accelmgr::manager {

ServedManager::ServedManager(boost::asio::io_context& loop, const Config& config,
                             std::span<const int> listeners)
    : loop_(loop), chosen_(choose_devices(config)), self_(ipc::open_pidfd(getpid())) {
  auto not_for_runners = chosen_.claims.sockets();
  not_for_runners.insert(not_for_runners.end(), listeners.begin(), listeners.end());
  first_fork_server_.emplace(fork_first_server(chosen_.config, self_.get(), not_for_runners));
  base::log().info("the manager (pid {}) begins; its fork server is process {}", getpid(),
                   first_fork_server_->pid());
  for (const int fd : not_for_runners) ipc::close_in_forks(fd);
  call_at_begin();
}

void ServedManager::make_session(const std::string& resume) {
  chosen_.config.checkpoint.resume = resume;
  owner_.emplace(SessionOwner::make(chosen_.config, [](const session::Session&, bool) {}));
  owner_->session().keep_from_children();
  config::arm_faults(chosen_.config, -1, owner_->session().control().managers.load());
  loader_ = &owner_->start_loading(chosen_.config);
}

void ServedManager::start(Events events) {
  writer_.emplace(
      chosen_.config.checkpoint, owner_->checkpoint_view(),
      [this](protocol::Saved saved) { lease_->saved(std::move(saved)); }, std::move(events.saves));
  if (!chosen_.config.checkpoint.resume.empty()) writer_->begin_with(chosen_.config.checkpoint.resume);
  supervisor_.emplace(
      loop_, chosen_.config, owner_->view(), owner_->manifest(), std::move(*first_fork_server_),
      [this] { return execute_fork_server(chosen_.config, self_.get()); },
      [this] { return loader_->reading(); });
  first_fork_server_.reset();
  lease_.emplace(loop_, owner_->view(), *supervisor_, chosen_.config.checkpoint.directory, Tenure::of_service,
                 Lease::Events{.save = [this](protocol::Save save) { writer_->write(std::move(save)); },
                               .freed = std::move(events.freed),
                               .saved = std::move(events.saved)});
  supervisor_->start(std::move(events.ready), std::move(events.gave_up));
}

void ServedManager::stop(base::Deadline deadline) {
  supervisor_->stop_runners(timing::runners_stop_s);
  if (!writer_->finish(deadline)) base::log().warn("a checkpoint was not written in time");
}

void ServedManager::abandon() noexcept {
  if (supervisor_) supervisor_->end_runners();
  if (first_fork_server_) first_fork_server_->stop(base::Deadline::in_seconds(timing::runners_stop_s));
}

}  // namespace accelmgr::manager
