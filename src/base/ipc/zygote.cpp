#include "base/ipc/zygote.hpp"

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
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/ipc/fork_server.hpp"
#include "base/ipc/process.hpp"
#include "base/ipc/process_local.hpp"
#include "base/ipc/roles.hpp"
#include "base/ipc/socket.hpp"
#include "base/timing.hpp"

namespace accelmgr::ipc {
namespace {

/// The descriptors of a request, in this order. The text of the request is the role.
struct Passed {
  enum : std::size_t { socket, creator, status, directory, input, output, errors, count };
};

struct Answer {
  pid_t pid;  ///< 0: refused, or the fork failed; `error` is an errno value.
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
      if (!socket_ || has_ended(process_.pidfd.get())) start();
      try {
        return ask(role);
      } catch (const Error&) {
        // The zygote has died or hangs. Try once with a new one.
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
    auto zygote = execute_in_role(zygote_argument);
    process_ = std::move(zygote.process);
    socket_ = std::move(zygote.socket);
  }

  void end() noexcept {
    socket_.reset();
    if (process_.pidfd) end_group(process_, base::Deadline::at_ns(0));
    process_ = {};
  }

  Served ask(const std::string& role) {
    auto [ours, theirs] = socket_pair();
    auto [status, status_theirs] = make_pipe();
    const auto creator = open_pidfd(getpid());
    const base::UniqueFd directory(open(".", O_PATH | O_CLOEXEC));
    if (!directory) throw SystemError("opening the working directory", errno);
    const std::array<int, Passed::count> fds = {theirs.get(),    creator.get(), status_theirs.get(),
                                                directory.get(), STDIN_FILENO,  STDOUT_FILENO,
                                                STDERR_FILENO};
    const auto deadline = base::Deadline::in_seconds(timing::first_words_s);
    send(socket_.get(), role, fds, deadline);
    auto message = receive(socket_.get(), deadline);
    if (!message) throw SessionError("the zygote ended when it was asked for a " + role);
    Answer answer{};
    if (message->bytes.size() != sizeof answer)
      throw SessionError(fmt::format("the zygote answered with {} bytes; its answer must have {}",
                                     message->bytes.size(), sizeof answer));
    std::memcpy(&answer, message->bytes.data(), sizeof answer);
    if (answer.pid == 0) throw SystemError(fmt::format("fork of a {} by the zygote", role), answer.error);
    // A signal to process group 0 or 1 would reach this process's own group, or all processes.
    if (answer.pid < 2)
      throw SessionError(fmt::format(
          "the zygote answered that the {} is process {}; a pid must be greater than 1", role, answer.pid));
    if (message->fds.size() != 1)
      throw SessionError(fmt::format(
          "the zygote's answer came with {} descriptors; it must come with a pidfd", message->fds.size()));
    return {std::move(ours), {answer.pid, std::move(message->fds[0])}, std::move(status)};
  }

  std::mutex mutex_;
  base::UniqueFd socket_;
  Child process_;
};

[[noreturn]] void become(const ForkedRole& role, std::vector<base::UniqueFd> fds) noexcept {
  setpgid(0, 0);
  default_signals();
  close(role_socket);
  close(role_creator);
  dup2(fds[Passed::input].get(), STDIN_FILENO);
  dup2(fds[Passed::output].get(), STDOUT_FILENO);
  dup2(fds[Passed::errors].get(), STDERR_FILENO);
  if (fchdir(fds[Passed::directory].get()) != 0) _exit(exit_uncaught);
  auto socket = std::move(fds[Passed::socket]);
  auto creator = std::move(fds[Passed::creator]);
  fds.clear();
  role(std::move(socket), std::move(creator));
  _exit(exit_uncaught);
}

/// A forked process that has not ended. The reader of the pipe `status` may be gone.
struct Forked {
  Child process;
  base::UniqueFd status;
};

class Forks {
 public:
  /// Answers an invalid request with an error, because its sender waits for an answer.
  void serve(Message message) {
    const auto* role = find_forked_role(message.bytes);
    Answer answer{};
    if (!message.missing.empty())
      answer.error = EMFILE;
    else if (role == nullptr)
      answer.error = ENOSYS;
    else if (message.fds.size() != Passed::count)
      answer.error = EINVAL;
    else if ((answer.pid = fork()) < 0)
      answer = {.pid = 0, .error = errno};
    else if (answer.pid == 0) {
      running_.clear();
      become(*role, std::move(message.fds));
    }
    base::UniqueFd pidfd;
    if (answer.pid > 0) {
      setpgid(answer.pid, answer.pid);  // The child does it too: the group must exist when either goes on.
      pidfd = open_pidfd(answer.pid);
    }
    const int fd = pidfd.get();
    send(role_socket, {reinterpret_cast<const char*>(&answer), sizeof answer}, {&fd, pidfd ? 1U : 0U});
    if (pidfd) running_.push_back({{answer.pid, std::move(pidfd)}, std::move(message.fds[Passed::status])});
  }

  void reap() {
    std::erase_if(running_, [](const Forked& forked) {
      end_group_of_killed(forked.process);
      const auto status = take_exit_status(forked.process.pidfd.get());
      if (status && write(forked.status.get(), &*status, sizeof *status) < 0) return true;  // Reader gone.
      return status.has_value();
    });
  }

  /// Blocks until there is a request, the creator has ended or a child has.
  std::array<pollfd, 2> wait() const {
    std::vector<pollfd> entries{{.fd = role_socket, .events = POLLIN, .revents = 0},
                                {.fd = role_creator, .events = POLLIN, .revents = 0}};
    for (const auto& forked : running_)
      entries.push_back({.fd = forked.process.pidfd.get(), .events = POLLIN, .revents = 0});
    if (poll(entries.data(), entries.size(), -1) < 0 && errno != EINTR) _exit(1);
    return {entries[0], entries[1]};
  }

 private:
  std::vector<Forked> running_;
};

/// nullopt if the peer has closed the socket. A message that is too large or empty becomes an empty one,
/// which names no role.
std::optional<Message> receive_request() {
  try {
    return receive_what_fits(role_socket, base::Deadline::at_ns(0));
  } catch (const SessionError&) {
    return Message{};
  }
}

/// Replaces the standard streams by /dev/null. Fork servers get their streams with each request; open here,
/// they would keep pipes of the creator open.
void let_go_of_streams() {
  const base::UniqueFd null(open("/dev/null", O_RDWR | O_CLOEXEC));
  if (!null) return;
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) dup2(null.get(), fd);
}

/// The main function of this program executed as the zygote.
[[noreturn]] void run_zygote() noexcept {
  name_process("accelmgr:zygote");
  for (const int number : {SIGHUP, SIGINT, SIGQUIT, SIGTERM}) signal(number, SIG_IGN);
  signal(SIGPIPE, SIG_IGN);
  prctl(PR_SET_PDEATHSIG, SIGCONT);  // Continues a stopped zygote, so that it sees its creator's end.
  let_go_of_streams();
  Forks forks;
  try {
    for (;;) {
      const auto [request, creator] = forks.wait();
      if (creator.revents != 0) _exit(0);
      forks.reap();
      if (request.revents == 0) continue;
      auto message = receive_request();
      if (!message) _exit(0);
      forks.serve(std::move(*message));
    }
  } catch (const std::exception&) {
    _exit(1);  // The creator sees its end.
  }
}

const RegisteredRole zygote(zygote_argument, [](std::span<const std::string_view> arguments) {
  if (!arguments.empty()) return;
  keep_role_descriptors();
  run_zygote();
});

}  // namespace

Served execute_in_role(const char* argument) {
  auto [ours, theirs] = socket_pair();
  const auto creator = open_pidfd(getpid());
  const std::pair<int, int> inherited[] = {{theirs.get(), role_socket}, {creator.get(), role_creator}};
  return {std::move(ours), execute_self({argument}, inherited), {}};
}

Served fork_from_zygote(const char* role) { return process_local<Server>().fork(role); }

void keep_role_descriptors() noexcept {
  for (const int fd : {role_socket, role_creator}) fcntl(fd, F_SETFD, FD_CLOEXEC);
}

void end_zygote() noexcept { process_local<Server>().stop(); }

}  // namespace accelmgr::ipc
