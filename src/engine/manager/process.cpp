#include "engine/manager/process.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <cerrno>
#include <iterator>
#include <optional>
#include <tuple>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/config/device_name.hpp"
#include "base/config/faults.hpp"
#include "base/config/loader.hpp"
#include "base/exception_text.hpp"
#include "base/ipc/fork_server_client.hpp"
#include "base/ipc/process.hpp"
#include "base/ipc/socket.hpp"
#include "base/ipc/user_forks.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"
#include "engine/device/assignment.hpp"
#include "engine/manager/checkpoint_writer.hpp"
#include "engine/manager/chosen_devices.hpp"
#include "engine/manager/fork_servers.hpp"
#include "engine/manager/interpreter.hpp"
#include "engine/manager/lease.hpp"
#include "engine/manager/session_owner.hpp"
#include "engine/manager/supervisor.hpp"
#include "engine/protocol/messages.hpp"

namespace accelmgr::manager {
namespace {

/// Chooses and claims the devices of the runners, and tells the host those that its configuration leaves
/// open.
ChosenDevices with_devices(const Config& given, int socket) {
  auto chosen = choose_devices(given);
  const auto& [nprocs, runners] = std::tie(chosen.config.nprocs, chosen.config.runners);
  if (device::leaves_devices_open(given))
    protocol::send_assigned(socket, {nprocs, std::string(config::name_of(runners.device)), runners.devices});
  return chosen;
}

/// Claims the GPUs of a session that this manager takes over.
device::GpuClaims claims_of_session(const Config& config) {
  device::GpuClaims claims(config);
  if (!claims.missed().empty())
    base::log().warn("another session has {} by now; the runners of this one compute there too",
                     claims.missed());
  return claims;
}

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

/// The host of this manager.
struct Host {
  int socket;
  int pidfd;
  bool is_gone() const noexcept { return ipc::is_closed(socket) || ipc::has_ended(pidfd); }
};

/// Checks getppid() after opening the pidfd: the pid alone could be another process's by now.
base::UniqueFd pidfd_of_parent(int socket) {
  ucred host{};
  socklen_t size = sizeof host;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &host, &size) != 0)
    throw SystemError("asking the socket for the host's pid", errno);
  auto pidfd = ipc::open_pidfd(host.pid);
  if (getppid() != host.pid) throw SessionError("the host ended before the manager began");
  return pidfd;
}

/// Runs the supervisor, then ends the process without unwinding: other threads still use what is on this
/// stack. Throws only before it has started threads itself.
[[noreturn]] void supervise(const Config& config, const SessionOwner& owner, const data::Loader& loader,
                            ipc::ForkServerClient fork_server, Host host, Image image, StartOrder order) {
  boost::asio::io_context loop;
  std::optional<Lease> lease;
  CheckpointWriter writer(config.checkpoint, owner.checkpoint_view(),
                          [&](protocol::Saved saved) { lease->saved(std::move(saved)); });
  Supervisor supervisor(
      loop, config, owner.view(), owner.manifest(), std::move(fork_server),
      [&] {
        if (image == Image::forked) throw SessionError("only the host can fork another one: refresh()");
        return execute_fork_server(config, host.pidfd);
      },
      [&] { return loader.reading(); });
  lease.emplace(loop, owner.view(), supervisor, config.checkpoint.directory, Tenure::of_host,
                Lease::Events{.save = [&](protocol::Save save) { writer.write(std::move(save)); },
                              .freed = [&] { loop.stop(); }});
  lease->begin_with_host(base::duplicate(host.socket), base::duplicate(host.pidfd));
  try {
    supervisor.start([&] { protocol::send_started(host.socket, supervisor.started()); }, [] {}, order);
    loop.run();
    if (!supervisor.has_started()) throw SessionError("the host ended while the runners started");
  } catch (...) {
    supervisor.end_runners();
    fail(host.socket);
  }
  const bool alone = host.is_gone();
  base::log().info("the runners are stopped: {}", alone ? "the host is gone" : "the host asked for it");
  supervisor.stop_runners(alone ? timing::host_gone_s : timing::runners_stop_s);
  // The host bounds how long a stop may take. Without a host, nothing waits for a disk that hangs.
  while (!writer.finish(base::Deadline::in_seconds(timing::writer_look_s)) && !host.is_gone()) {
  }
  lease->tell_of_saved();  // The loop has ended.
  ipc::exit_with_group(0);
}

[[noreturn]] void serve_host(int socket, base::UniqueFd host_pidfd, Image image) {
  base::start_logging("manager");
  if (!host_pidfd) host_pidfd = pidfd_of_parent(socket);
  const auto patience = base::Deadline::in_seconds(timing::first_words_s);
  const auto given = config::from_yaml(protocol::receive_configuration(socket, patience));
  auto offered = protocol::receive_begin(socket, patience);
  // Before the fork server, so that its configuration has the devices, and while there is one thread. Who
  // takes a session over keeps its devices, which the manager before may have still.
  const bool takes_over = !offered.empty();
  const auto chosen = takes_over ? std::nullopt : std::optional(with_devices(given, socket));
  const auto& config = chosen ? chosen->config : given;
  // Runners can be forked from this fork server: no code of the user has run, and there is no second thread.
  auto not_for_runners = chosen ? chosen->claims.sockets() : std::vector<int>();
  not_for_runners.push_back(socket);
  auto fork_server = fork_first_server(config, host_pidfd.get(), not_for_runners);
  base::log().info("the manager (pid {}) begins; its fork server is process {}", getpid(), fork_server.pid());
  ipc::default_in_forks(ipc::signals_of_host);
  call_at_begin();
  std::optional<device::GpuClaims> taken_over;
  if (takes_over) {
    protocol::receive_free(socket, base::Deadline::in_seconds(timing::first_words_s));
    taken_over = claims_of_session(config);
    std::ranges::copy(taken_over->sockets(), std::back_inserter(not_for_runners));
  }
  for (const int fd : not_for_runners) ipc::close_in_forks(fd);
  const auto prepared = [&](const session::Session& session, bool needs_values) {
    interpreter().forget_values();
    protocol::send_prepared(socket, session.fds(), needs_values,
                            base::Deadline::in_seconds(config.start_timeout));
  };
  auto owner =
      takes_over ? SessionOwner::take_over(config, std::move(offered)) : SessionOwner::make(config, prepared);
  const auto& session = owner.session();
  session.keep_from_children();
  config::arm_faults(config, -1, session.control().managers.load());
  const auto& loader = owner.start_loading(config);
  try {
    // Forks of the host have its model: they make none.
    const auto order = takes_over && image == Image::forked ? StartOrder::at_once : StartOrder::by_rank;
    supervise(config, owner, loader, std::move(fork_server), {socket, host_pidfd.get()}, image, order);
  } catch (...) {
    fail(socket);
  }
}

}  // namespace

void run(base::UniqueFd socket, base::UniqueFd host_pidfd, Image image) {
  try {
    ipc::name_process("accelmgr:mgr");
    ipc::survive_failed_writes();
    ipc::leave_signals_to_host();
    serve_host(socket.get(), std::move(host_pidfd), image);
  } catch (...) {
    fail(socket.get());
  }
}

}  // namespace accelmgr::manager
