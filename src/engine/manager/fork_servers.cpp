#include "engine/manager/fork_servers.hpp"

#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>

#include "accelmgr/errors.hpp"
#include "base/config/loader.hpp"
#include "base/ipc/leftovers.hpp"
#include "base/ipc/proc_file.hpp"
#include "base/ipc/process.hpp"
#include "base/ipc/socket.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"
#include "engine/manager/interpreter.hpp"
#include "engine/manager/role.hpp"
#include "engine/protocol/messages.hpp"
#include "engine/runner/process.hpp"
#include "engine/runner/rank_setup.hpp"

namespace accelmgr::manager {
namespace {

bool is_of(pid_t pid, int pidfd) {
  const auto text = ipc::read_proc(fmt::format("/proc/self/fdinfo/{}", pidfd)).value_or("");
  return text.find(fmt::format("\nPid:\t{}\n", pid)) != std::string::npos;
}

/// The process group of the manager contains what user code forks there, for instance workers of a data
/// loader. It is 0 here if the manager leads no group of its own. A service has no host from the start, and a
/// shell may have made its group, for all programs of a pipeline. What it forks bears its mark instead.
ipc::ForkServerOptions options_of(int creator, pid_t manager, int host_pidfd) {
  const bool is_service = is_of(manager, host_pidfd);
  const bool owns_group = getpgid(manager) == manager && !is_service;
  return {.creator = creator,
          .creator_group = owns_group ? manager : 0,
          .creator_mark = is_service ? ipc::own_mark() : std::string(),
          .host = host_pidfd};
}

ipc::ChildMain runner_main(const Config& config) {
  return [&config](ipc::SpawnRequest request) {
    runner::set_environment_of_rank(config, request.rank);
    interpreter().runner_began();
    const auto own = runner::config_of_rank(config, request.rank);
    return runner::run(own, std::move(request));
  };
}

}  // namespace

ipc::ForkServerClient fork_first_server(const Config& config, int host_pidfd,
                                        std::span<const int> close_in_fork_server) {
  interpreter().runners_expected(config);
  auto options = options_of(-1, getpid(), host_pidfd);
  options.begin = interpreter().forget_values;
  return ipc::ForkServerClient::start(runner_main(config), std::move(options), close_in_fork_server);
}

ipc::ForkServerClient execute_fork_server(const Config& config, int host_pidfd) {
  auto [ours, theirs] = ipc::socket_pair();
  const std::pair<int, int> inherited[] = {{theirs.get(), role_socket}, {host_pidfd, role_host}};
  auto process = ipc::execute_self({fork_server_argument}, inherited);
  theirs.reset();
  try {
    protocol::send_begin(ours.get(), {.configuration = config::to_yaml(config)});
  } catch (const SystemError& error) {
    if (!ipc::peer_is_gone(error)) throw;  // It has ended already. Its pidfd reports that.
  }
  return {std::move(ours), std::move(process)};
}

void run_fork_server(base::UniqueFd socket) {
  int code = 1;
  try {
    ipc::name_process("accelmgr:fork");
    ipc::survive_failed_writes();
    ipc::leave_signals_to_host();
    ucred manager{};
    socklen_t size = sizeof manager;
    if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &manager, &size) != 0)
      throw SystemError("asking the socket for the manager's pid", errno);
    const auto manager_pidfd = ipc::open_pidfd(manager.pid);
    if (getppid() != manager.pid) throw SessionError("the manager ended before the fork server began");
    const base::UniqueFd host_pidfd(role_host);
    base::start_logging("fork server");
    const auto begin =
        protocol::receive_begin(socket.get(), base::Deadline::in_seconds(timing::first_words_s));
    const auto config = config::from_yaml(begin.configuration);
    interpreter().runners_expected(config);
    const auto child_main = runner_main(config);
    code = ipc::run_fork_server(std::move(socket), child_main,
                                options_of(manager_pidfd.get(), manager.pid, host_pidfd.get()));
  } catch (const std::exception& error) {
    base::log().error("the fork server could not begin: {}", error.what());
  }
  _exit(code);
}

}  // namespace accelmgr::manager
