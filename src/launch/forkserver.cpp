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
#include <mutex>

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

/// The descriptors of a request, in their order.
struct Passed {
  enum : std::size_t { socket, creator, directory, input, output, errors, count };
};

struct Answer {
  pid_t pid;  ///< 0: it could not be forked.
  int error;
};

class Server {
 public:
  ipc::LauncherClient launcher() {
    const std::lock_guard lock(mutex_);
    for (int attempt = 0;; ++attempt) {
      if (!socket_ || ipc::has_ended(process_.pidfd.get())) start();
      try {
        return ask();
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

  ipc::LauncherClient ask() {
    auto [ours, theirs] = ipc::socket_pair();
    const auto creator = ipc::open_pidfd(getpid());
    const base::UniqueFd directory(open(".", O_PATH | O_CLOEXEC));
    if (!directory) throw SystemError("opening the working directory", errno);
    const std::array<int, Passed::count> fds = {theirs.get(), creator.get(), directory.get(),
                                                STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO};
    const auto deadline = base::Deadline::in_seconds(answer_timeout_s);
    ipc::send(socket_.get(), "launcher", fds, deadline);
    auto message = ipc::receive(socket_.get(), deadline);
    if (!message) throw SessionError("the forkserver ended when it was asked for a launcher");
    Answer answer{};
    if (message->bytes.size() != sizeof answer)
      throw SessionError(fmt::format("the forkserver answered with {} bytes", message->bytes.size()));
    std::memcpy(&answer, message->bytes.data(), sizeof answer);
    if (answer.pid == 0) throw SystemError("fork of the launcher by the forkserver", answer.error);
    if (message->fds.size() != 1) throw SessionError("the forkserver's answer came without a pidfd");
    return {std::move(ours), ipc::Child{answer.pid, std::move(message->fds[0])}};
  }

  std::mutex mutex_;
  base::UniqueFd socket_;
  ipc::Child process_;
};

[[noreturn]] void become_launcher(std::vector<base::UniqueFd> fds) noexcept {
  close(role_socket);
  close(role_creator);
  dup2(fds[Passed::input].get(), STDIN_FILENO);
  dup2(fds[Passed::output].get(), STDOUT_FILENO);
  dup2(fds[Passed::errors].get(), STDERR_FILENO);
  if (fchdir(fds[Passed::directory].get()) != 0) _exit(ipc::exit_uncaught);
  auto socket = std::move(fds[Passed::socket]);
  const auto creator = std::move(fds[Passed::creator]);
  fds.clear();
  const ipc::ChildMain child_main = [](ipc::SpawnRequest request) -> int {
    run_child(std::move(request), {}, {});
  };
  ipc::become_launcher_beside_threads(
      std::move(socket), child_main,
      {.creator = creator.get(), .adopt_orphans = true, .child_name = "accelmgr:rank", .core_dumps = true});
}

void serve(std::vector<base::UniqueFd> fds) {
  if (fds.size() != Passed::count) throw SessionError("a request without its descriptors");
  Answer answer{};
  answer.pid = fork();
  if (answer.pid == 0) become_launcher(std::move(fds));
  base::UniqueFd pidfd;
  if (answer.pid < 0) {
    answer = {.pid = 0, .error = errno};
  } else {
    pidfd = ipc::open_pidfd(answer.pid);
  }
  const int fd = pidfd.get();
  ipc::send(role_socket, {reinterpret_cast<const char*>(&answer), sizeof answer}, {&fd, pidfd ? 1U : 0U});
}

/// The streams of the process it was made by are for the launchers; here they would only be held open.
void let_go_of_streams() {
  const base::UniqueFd null(open("/dev/null", O_RDWR | O_CLOEXEC));
  if (!null) return;
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) dup2(null.get(), fd);
}

}  // namespace

ipc::LauncherClient launcher_from_forkserver() { return of_this_process<Server>().launcher(); }

void end_forkserver() noexcept { of_this_process<Server>().stop(); }

void run_forkserver() noexcept {
  ipc::name_process("accelmgr:server");
  for (const int number : {SIGHUP, SIGINT, SIGQUIT, SIGTERM}) signal(number, SIG_IGN);
  signal(SIGCHLD, SIG_IGN);          // Nobody waits for the launchers here.
  prctl(PR_SET_PDEATHSIG, SIGCONT);  // Stopped, it would not see the end of its process.
  for (const int fd : {role_socket, role_creator}) fcntl(fd, F_SETFD, FD_CLOEXEC);
  let_go_of_streams();
  try {
    for (;;) {
      pollfd entries[] = {{.fd = role_socket, .events = POLLIN, .revents = 0},
                          {.fd = role_creator, .events = POLLIN, .revents = 0}};
      if (poll(entries, 2, -1) < 0 && errno != EINTR) _exit(1);
      if (entries[1].revents != 0) _exit(0);
      if (entries[0].revents == 0) continue;
      auto message = ipc::receive(role_socket, base::Deadline::at_ns(0));
      if (!message) _exit(0);
      serve(std::move(message->fds));
    }
  } catch (const std::exception&) {
    _exit(1);  // Who asked sees it end.
  }
}

}  // namespace accelmgr::launch
