#include "launch/forkserver.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "accelmgr/errors.hpp"
#include "ipc/process.hpp"
#include "ipc/socket.hpp"
#include "launch/child.hpp"
#include "launch/per_process.hpp"
#include "launch/spawner.hpp"

namespace accelmgr::launch {
namespace {

constexpr int role_socket = 3;
constexpr int role_creator = 4;  ///< The pidfd of the process that it serves.
constexpr double answer_timeout_s = 30;
constexpr const char* launcher_role = "launcher";

/// The descriptors of a request, in their order; its text is the role.
struct Passed {
  enum : std::size_t { socket, creator, status, directory, input, output, errors, count };
};

struct Answer {
  pid_t pid;  ///< 0: it could not be forked.
  int error;
};

std::pair<base::UniqueFd, base::UniqueFd> make_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw SystemError("making a pipe", errno);
  return {base::UniqueFd(ends[0]), base::UniqueFd(ends[1])};
}

class Server {
 public:
  Served fork(const std::string& role) {
    const std::lock_guard lock(mutex_);
    for (int attempt = 0;; ++attempt) {
      if (!socket_ || ipc::has_ended(process_.pidfd.get())) start();
      try {
        return ask(role);
      } catch (const Error&) {
        // It may have died meanwhile; or it hangs, and is of no use any more.
        end();
        if (attempt > 0) throw;
      }
    }
  }

  void stop() noexcept {
    const std::lock_guard lock(mutex_);
    end();
  }

 private:
  void start() {
    end();
    auto [ours, theirs] = ipc::socket_pair();
    const auto creator = ipc::open_pidfd(getpid());
    const std::pair<int, int> inherited[] = {{theirs.get(), role_socket}, {creator.get(), role_creator}};
    process_ = ipc::execute_self({forkserver_argument}, inherited);
    socket_ = std::move(ours);
  }

  void end() noexcept {
    socket_.reset();
    if (process_.pidfd) ipc::end_group(process_, base::Deadline::at_ns(0));
    process_ = {};
  }

  Served ask(const std::string& role) {
    auto [ours, theirs] = ipc::socket_pair();
    auto [status, status_theirs] = make_pipe();
    const auto creator = ipc::open_pidfd(getpid());
    const base::UniqueFd directory(open(".", O_PATH | O_CLOEXEC));
    if (!directory) throw SystemError("opening the working directory", errno);
    const std::array<int, Passed::count> fds = {theirs.get(),    creator.get(), status_theirs.get(),
                                                directory.get(), STDIN_FILENO,  STDOUT_FILENO,
                                                STDERR_FILENO};
    const auto deadline = base::Deadline::in_seconds(answer_timeout_s);
    ipc::send(socket_.get(), role, fds, deadline);
    auto message = ipc::receive(socket_.get(), deadline);
    if (!message) throw SessionError("the forkserver ended when it was asked for a " + role);
    Answer answer{};
    if (message->bytes.size() != sizeof answer)
      throw SessionError(fmt::format("the forkserver answered with {} bytes", message->bytes.size()));
    std::memcpy(&answer, message->bytes.data(), sizeof answer);
    if (answer.pid == 0) throw SystemError(fmt::format("fork of a {} by the forkserver", role), answer.error);
    if (message->fds.size() != 1) throw SessionError("the forkserver's answer came without a pidfd");
    return {std::move(ours), {answer.pid, std::move(message->fds[0])}, std::move(status)};
  }

  std::mutex mutex_;
  base::UniqueFd socket_;
  ipc::Child process_;
};

[[noreturn]] void become_launcher(base::UniqueFd socket, const base::UniqueFd& creator) noexcept {
  const ipc::ChildMain child_main = [](ipc::SpawnRequest request) -> int {
    run_child(std::move(request), {}, {});
  };
  ipc::become_launcher_beside_threads(
      std::move(socket), child_main,
      {.creator = creator.get(), .adopt_orphans = true, .child_name = "accelmgr:rank", .core_dumps = true});
}

using Roles = std::map<std::string, ServerRole>;

Roles& roles() {
  static Roles roles{{launcher_role, [](base::UniqueFd socket, const base::UniqueFd& creator) {
                        become_launcher(std::move(socket), creator);
                      }}};
  return roles;
}

[[noreturn]] void become(const ServerRole& role, std::vector<base::UniqueFd> fds) noexcept {
  setpgid(0, 0);
  ipc::default_signals();
  close(role_socket);
  close(role_creator);
  dup2(fds[Passed::input].get(), STDIN_FILENO);
  dup2(fds[Passed::output].get(), STDOUT_FILENO);
  dup2(fds[Passed::errors].get(), STDERR_FILENO);
  if (fchdir(fds[Passed::directory].get()) != 0) _exit(ipc::exit_uncaught);
  auto socket = std::move(fds[Passed::socket]);
  auto creator = std::move(fds[Passed::creator]);
  fds.clear();
  role(std::move(socket), std::move(creator));
  _exit(ipc::exit_uncaught);
}

/// What was forked and has not ended. The pipe's reader may be gone.
struct Forked {
  base::UniqueFd pidfd, status;
};

class Forks {
 public:
  void serve(ipc::Message message) {
    if (message.fds.size() != Passed::count) throw SessionError("a request without its descriptors");
    Answer answer{};
    const auto role = roles().find(message.bytes);
    answer.pid = role != roles().end() ? fork() : -1;
    if (answer.pid == 0) {
      running_.clear();
      become(role->second, std::move(message.fds));
    }
    base::UniqueFd pidfd;
    if (answer.pid < 0) {
      answer = {.pid = 0, .error = role != roles().end() ? errno : ENOSYS};
    } else {
      setpgid(answer.pid, answer.pid);  // Whoever is first.
      pidfd = ipc::open_pidfd(answer.pid);
    }
    const int fd = pidfd.get();
    ipc::send(role_socket, {reinterpret_cast<const char*>(&answer), sizeof answer}, {&fd, pidfd ? 1U : 0U});
    if (pidfd) running_.push_back({std::move(pidfd), std::move(message.fds[Passed::status])});
  }

  void reap() {
    std::erase_if(running_, [](const Forked& forked) {
      const auto status = ipc::take_exit_status(forked.pidfd.get());
      if (status && write(forked.status.get(), &*status, sizeof *status) < 0) return true;  // Nobody asks.
      return status.has_value();
    });
  }

  /// Blocks until there is a request, the creator has ended or a child has.
  std::array<pollfd, 2> wait() const {
    std::vector<pollfd> entries{{.fd = role_socket, .events = POLLIN, .revents = 0},
                                {.fd = role_creator, .events = POLLIN, .revents = 0}};
    for (const auto& forked : running_)
      entries.push_back({.fd = forked.pidfd.get(), .events = POLLIN, .revents = 0});
    if (poll(entries.data(), entries.size(), -1) < 0 && errno != EINTR) _exit(1);
    return {entries[0], entries[1]};
  }

 private:
  std::vector<Forked> running_;
};

/// The streams of the process it was made by are for the launchers; here they would only be held open.
void let_go_of_streams() {
  const base::UniqueFd null(open("/dev/null", O_RDWR | O_CLOEXEC));
  if (!null) return;
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) dup2(null.get(), fd);
}

}  // namespace

void serve_role(const char* name, ServerRole role) { roles().insert_or_assign(name, std::move(role)); }

Served fork_from_server(const char* role) { return of_this_process<Server>().fork(role); }

ipc::LauncherClient launcher_from_forkserver() {
  auto served = fork_from_server(launcher_role);
  return {std::move(served.socket), std::move(served.process)};
}

void end_forkserver() noexcept { of_this_process<Server>().stop(); }

void run_forkserver() noexcept {
  ipc::name_process("accelmgr:server");
  for (const int number : {SIGHUP, SIGINT, SIGQUIT, SIGTERM}) signal(number, SIG_IGN);
  signal(SIGPIPE, SIG_IGN);
  prctl(PR_SET_PDEATHSIG, SIGCONT);  // Stopped, it would not see the end of its process.
  for (const int fd : {role_socket, role_creator}) fcntl(fd, F_SETFD, FD_CLOEXEC);
  let_go_of_streams();
  Forks forks;
  try {
    for (;;) {
      const auto [request, creator] = forks.wait();
      if (creator.revents != 0) _exit(0);
      forks.reap();
      if (request.revents == 0) continue;
      auto message = ipc::receive(role_socket, base::Deadline::at_ns(0));
      if (!message) _exit(0);
      forks.serve(std::move(*message));
    }
  } catch (const std::exception&) {
    _exit(1);  // Who asked sees it end.
  }
}

}  // namespace accelmgr::launch
