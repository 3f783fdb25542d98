#include "engine/manager/manager.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/config/faults.hpp"
#include "base/config/loader.hpp"
#include "base/exception_text.hpp"
#include "base/ipc/process.hpp"
#include "base/ipc/socket.hpp"
#include "base/ipc/user_forks.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"
#include "engine/manager/fork_servers.hpp"
#include "engine/manager/interpreter.hpp"
#include "engine/protocol/messages.hpp"

namespace accelmgr::manager {

Manager::Manager(boost::asio::io_context& loop, ChosenDevices chosen, Origin origin,
                 std::vector<int> not_for_runners)
    : loop_(loop), chosen_(std::move(chosen)), origin_(origin) {
  const auto claims = chosen_.claims.sockets();
  not_for_runners.insert(not_for_runners.end(), claims.begin(), claims.end());
  // Runners can be forked from this fork server: no code of the user has run, and there is no second thread.
  first_fork_server_.emplace(fork_first_server(chosen_.config, origin_.ends_with, not_for_runners));
  base::log().info("the manager (pid {}) begins; its fork server is process {}", getpid(),
                   first_fork_server_->pid());
  for (const int fd : not_for_runners) ipc::close_in_forks(fd);
  if (origin_.tenure == Tenure::of_host) ipc::default_in_forks(ipc::signals_of_host);
  call_at_begin();
}

void Manager::make_session(const std::string& resume, const SessionOwner::Prepared& prepared) {
  chosen_.config.checkpoint.resume = resume;
  begin_session(SessionOwner::make(chosen_.config, prepared));
}

void Manager::take_over(std::vector<base::UniqueFd> session, bool reads_again) {
  chosen_.claims = device::GpuClaims(chosen_.config);
  if (!chosen_.claims.missed().empty())
    base::log().warn("another session has {} by now; the runners of this one compute there too",
                     chosen_.claims.missed());
  for (const int fd : chosen_.claims.sockets()) ipc::close_in_forks(fd);
  begin_session(SessionOwner::take_over(chosen_.config, std::move(session)), reads_again);
}

void Manager::begin_session(SessionOwner owner, bool reads_again) {
  owner_.emplace(std::move(owner));
  owner_->session().keep_from_children();
  config::arm_faults(chosen_.config, -1, owner_->session().control().managers.load());
  loader_ = &owner_->start_loading(chosen_.config, reads_again);
}

void Manager::start(Events events) {
  const auto& checkpoint = chosen_.config.checkpoint;
  writer_.emplace(
      checkpoint, owner_->checkpoint_view(),
      [this](protocol::Saved saved) { lease_->saved(std::move(saved)); }, std::move(events.saves));
  if (origin_.tenure == Tenure::of_service && !checkpoint.resume.empty())
    writer_->begin_with(checkpoint.resume);
  supervisor_.emplace(
      loop_, chosen_.config, owner_->view(), owner_->manifest(), std::move(*first_fork_server_),
      [this] {
        if (origin_.image == Image::forked)
          throw SessionError("only the host can fork another one: refresh()");
        return execute_fork_server(chosen_.config, origin_.ends_with);
      },
      [this] { return loader_->reading(); });
  first_fork_server_.reset();
  lease_.emplace(loop_, owner_->view(), *supervisor_, checkpoint.directory, origin_.tenure,
                 Lease::Events{.save = [this](protocol::Save save) { writer_->write(std::move(save)); },
                               .freed = std::move(events.freed),
                               .saved = std::move(events.saved)});
  // A forked manager that took over a session has the host's model in its memory: runners build none.
  const bool has_models = origin_.image == Image::forked && owner_->session().control().managers.load() > 0;
  supervisor_->start(std::move(events.ready), std::move(events.gave_up),
                     has_models ? StartOrder::at_once : StartOrder::by_rank);
}

void Manager::stop(double runners_s, const std::function<bool()>& gives_up) {
  supervisor_->stop_runners(runners_s);
  while (!writer_->finish(base::Deadline::in_seconds(timing::writer_look_s)))
    if (gives_up()) return base::log().warn("a checkpoint was not written in time");
}

void Manager::abandon() noexcept {
  if (supervisor_) supervisor_->end_runners();
  if (first_fork_server_) first_fork_server_->stop(base::Deadline::in_seconds(timing::runners_stop_s));
}

namespace {

/// Sends the error to the host, or logs it if the host is gone, and ends the process. The fork server sees
/// the end of its socket, and ends the runners that are left.
[[noreturn]] void fail(int socket, const Error& error) {
  try {
    protocol::send_failed(socket, error);
  } catch (const Error&) {
    base::log().error("{}", error.what());
  }
  ipc::exit_with_group(1);
}

/// Call in a handler: fails with the exception under way, which may be of any type.
[[noreturn]] void fail(int socket) {
  try {
    throw;
  } catch (const Error& error) {
    fail(socket, error);
  } catch (...) {
    fail(socket, Error(base::current_exception_text()));
  }
}

pid_t pid_of_peer(int socket) {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0)
    throw SystemError("asking the socket for the host's pid", errno);
  return peer.pid;
}

/// Checks getppid() after opening the pidfd: the pid alone could be another process's by now.
base::UniqueFd pidfd_of_parent(int socket) {
  const auto host = pid_of_peer(socket);
  auto pidfd = ipc::open_pidfd(host);
  if (getppid() != host) throw SessionError("the host ended before the manager began");
  return pidfd;
}

/// Sends the session to the host, and waits until it has written what the manager needs.
void open_session(int socket, const Manager& manager, const session::Session& session, bool needs_values,
                  bool has_session) {
  const auto& config = manager.config();
  protocol::send_opening(socket,
                         {.tenure = Tenure::of_host,
                          .lease = session.control().lease.load() + 1,
                          .configuration = config::to_yaml(config),
                          .needs_values = needs_values},
                         has_session ? std::vector<int>() : session.fds());
  protocol::receive_noted(socket, base::Deadline::in_seconds(config.start_timeout));
}

/// Ends the process without unwinding: other threads still use what is on this stack. Throws only before the
/// runners are started.
[[noreturn]] void serve_host(base::UniqueFd& socket, base::UniqueFd host_pidfd, Image image) {
  base::start_logging("manager");
  if (!host_pidfd) host_pidfd = pidfd_of_parent(socket.get());
  const auto patience = base::Deadline::in_seconds(timing::first_words_s);
  auto begin = protocol::receive_begin(socket.get(), patience);
  const auto given = config::from_yaml(begin.configuration);
  const bool takes_over = !begin.session.empty();
  boost::asio::io_context loop;
  // Who takes a session over keeps its devices, which the manager before may have still.
  Manager manager(loop, takes_over ? ChosenDevices{given, {}} : choose_devices(given),
                  {.tenure = Tenure::of_host, .ends_with = host_pidfd.get(), .image = image}, {socket.get()});
  if (takes_over) {
    protocol::receive_free(socket.get(), base::Deadline::in_seconds(timing::first_words_s));
    manager.take_over(std::move(begin.session), begin.reads_again);
    open_session(socket.get(), manager, manager.session(), /*needs_values=*/false, /*has_session=*/true);
  } else {
    manager.make_session(given.checkpoint.resume, [&](const session::Session& session, bool needs_values) {
      interpreter().forget_values();
      open_session(socket.get(), manager, session, needs_values, /*has_session=*/false);
    });
  }
  const auto is_gone = [&] { return ipc::is_closed(socket.get()) || ipc::has_ended(host_pidfd.get()); };
  try {
    manager.start({.ready = [&] { protocol::send_started(socket.get(), manager.supervisor().started()); },
                   .gave_up = [] {},
                   .freed = [&] { loop.stop(); },
                   .saved = [](const protocol::Saved&) {},
                   .saves = {}});
    manager.lease().give(
        {.name = "the host", .pid = pid_of_peer(socket.get()), .pidfd = base::duplicate(host_pidfd.get())},
        base::duplicate(socket.get()));
    loop.run();
    if (!manager.supervisor().has_started()) throw SessionError("the host ended while the runners started");
  } catch (...) {
    manager.abandon();
    fail(socket.get());
  }
  const bool alone = is_gone();
  base::log().info("the runners are stopped: {}", alone ? "the host is gone" : "the host asked for it");
  // The host bounds how long a stop may take. Without a host, nothing waits for a disk that hangs.
  manager.stop(alone ? timing::host_gone_s : timing::runners_stop_s, is_gone);
  manager.lease().tell_of_saved();  // The loop has ended.
  ipc::exit_with_group(0);
}

}  // namespace

void run(base::UniqueFd socket, base::UniqueFd host_pidfd, Image image) {
  try {
    ipc::name_process("accelmgr:mgr");
    ipc::survive_failed_writes();
    ipc::leave_signals_to_host();
    serve_host(socket, std::move(host_pidfd), image);
  } catch (...) {
    fail(socket.get());
  }
}

}  // namespace accelmgr::manager
