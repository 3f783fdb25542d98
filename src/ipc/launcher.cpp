#include "ipc/launcher.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "accelmgr/errors.hpp"
#include "base/log.hpp"
#include "ipc/socket.hpp"
#include "ipc/wait_ready.hpp"

namespace accelmgr::ipc {
namespace {

constexpr double kill_bound_s = 2;

// Both ends are the same image: the messages are these bytes.
struct Request {
  int rank;
  std::uint32_t generation;
};

struct Report {
  enum class Kind : int { started, ended };
  Kind kind;
  int rank;
  std::uint32_t generation;
  pid_t pid;
  int wait_status;
};

template <class Packet>
std::string_view bytes_of(const Packet& packet) noexcept {
  return {reinterpret_cast<const char*>(&packet), sizeof packet};
}

template <class Packet>
Packet packet_of(const Message& message) {
  if (message.bytes.size() != sizeof(Packet))
    throw SessionError(fmt::format("launcher: a packet of {} bytes was expected, one of {} came",
                                   sizeof(Packet), message.bytes.size()));
  Packet packet;
  std::memcpy(&packet, message.bytes.data(), sizeof packet);
  return packet;
}

void switch_off_core_dumps() noexcept {
  rlimit limit{};
  getrlimit(RLIMIT_CORE, &limit);
  // Less than any core; and unlike at 0 the kernel starts no core_pattern program either.
  limit.rlim_cur = std::min<rlim_t>(1, limit.rlim_max);
  setrlimit(RLIMIT_CORE, &limit);
}

int run_child_main(const ChildMain& child_main, SpawnRequest request) noexcept {
  const int rank = request.rank;
  try {
    return child_main(std::move(request));
  } catch (const std::exception& error) {
    fmt::print(stderr, "accelmgr: runner {} ended with an uncaught exception: {}\n", rank, error.what());
  } catch (...) {
    fmt::print(stderr, "accelmgr: runner {} ended with an uncaught exception of unknown type\n", rank);
  }
  return exit_uncaught;
}

class Launcher {
 public:
  Launcher(base::UniqueFd socket, const ChildMain& child_main)
      : socket_(std::move(socket)), child_main_(child_main) {}

  void run() {
    while (!client_gone_) {
      wait_for_work();
      reap_ended();
      serve_request();
    }
    end_children();
  }

  void end_children() noexcept {
    for (const auto& running : running_) kill(-running.pid, SIGKILL);
    const auto deadline = base::Deadline::in_seconds(kill_bound_s);
    for (const auto& running : running_)
      if (wait_ended(running.pidfd.get(), deadline)) waitpid(running.pid, nullptr, 0);
    running_.clear();
  }

 private:
  void wait_for_work() {
    std::vector<pollfd> entries{{.fd = socket_.get(), .events = POLLIN, .revents = 0}};
    for (const auto& running : running_)
      entries.push_back({.fd = running.pidfd.get(), .events = POLLIN, .revents = 0});
    while (poll(entries.data(), entries.size(), -1) < 0)
      if (errno != EINTR) throw SystemError("launcher: poll", errno);
  }

  void reap_ended() {
    for (auto running = running_.begin(); running != running_.end();) {
      if (!has_ended(running->pidfd.get())) {
        ++running;
        continue;
      }
      kill(-running->pid, SIGKILL);  // Before the leader is reaped: until then the group's number is its own.
      int wait_status = 0;
      waitpid(running->pid, &wait_status, 0);
      report({Report::Kind::ended, running->rank, running->generation, running->pid, wait_status});
      running = running_.erase(running);
    }
  }

  void serve_request() {
    if (client_gone_ || wait_ready(socket_.get(), POLLIN, base::Deadline::at_ns(0)) == 0) return;
    auto message = receive(socket_.get(), base::Deadline::at_ns(0));
    if (!message) {
      client_gone_ = true;
      return;
    }
    const auto request = packet_of<Request>(*message);
    try {
      start_child({request.rank, request.generation, std::move(message->fds)});
    } catch (const SystemError& error) {
      base::log().error("launcher: runner {} could not be started: {}", request.rank, error.what());
      report({Report::Kind::ended, request.rank, request.generation, 0, W_EXITCODE(exit_not_forked, 0)});
    }
  }

  void start_child(SpawnRequest request) {
    Started started{request.rank, request.generation, 0, {}};
    const pid_t launcher = getpid();
    std::fflush(nullptr);  // What is buffered would be written by the child too.
    const pid_t pid = fork();
    if (pid < 0) throw SystemError("fork", errno);
    if (pid == 0) become_child(launcher, std::move(request));
    setpgid(pid, pid);  // In the child too: whoever comes first, the group exists for both.
    started.pid = pid;
    try {
      started.pidfd = open_pidfd(pid);
    } catch (const SystemError&) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
      throw;
    }
    const int pidfd = started.pidfd.get();
    report({Report::Kind::started, request.rank, request.generation, pid, 0}, {&pidfd, 1});
    running_.push_back(std::move(started));
  }

  [[noreturn]] void become_child(pid_t launcher, SpawnRequest request) noexcept {
    die_with(launcher);
    setpgid(0, 0);
    name_process(fmt::format("accelmgr:run{}", request.rank).c_str());
    switch_off_core_dumps();
    socket_.reset();
    running_.clear();
    const int code = run_child_main(child_main_, std::move(request));
    std::fflush(nullptr);
    _exit(code);
  }

  void report(const Report& report, std::span<const int> fds = {}) {
    try {
      send(socket_.get(), bytes_of(report), fds);
    } catch (const Error&) {
      client_gone_ = true;  // Or it reads nothing for so long that it is as good as gone.
    }
  }

  base::UniqueFd socket_;
  const ChildMain& child_main_;
  std::vector<Started> running_;
  bool client_gone_ = false;
};

void check_one_thread() {
  if (thread_count() == 1) return;
  throw UsageError(fmt::format("the launcher is forked from a process of one thread, this one has: {}",
                               fmt::join(thread_names(), ", ")));
}

[[noreturn]] void become_launcher(pid_t parent, base::UniqueFd socket, const ChildMain& child_main) noexcept {
  die_with(parent);
  setpgid(0, 0);
  name_process("accelmgr:launch");
  _exit(run_launcher(std::move(socket), child_main));
}

}  // namespace

int run_launcher(base::UniqueFd socket, const ChildMain& child_main) {
  Launcher launcher(std::move(socket), child_main);
  try {
    launcher.run();
    return 0;
  } catch (const std::exception& error) {
    base::log().error("launcher: {}; its runners end with it", error.what());
    launcher.end_children();
    return 1;
  }
}

LauncherClient LauncherClient::start(const ChildMain& child_main, std::span<const int> close_in_launcher) {
  check_one_thread();
  auto [ours, theirs] = socket_pair();
  const pid_t parent = getpid();
  std::fflush(nullptr);
  const pid_t pid = fork();
  if (pid < 0) throw SystemError("fork of the launcher", errno);
  if (pid == 0) {
    ours.reset();
    for (const int fd : close_in_launcher) close(fd);
    become_launcher(parent, std::move(theirs), child_main);
  }
  setpgid(pid, pid);
  try {
    return LauncherClient(std::move(ours), Child{pid, open_pidfd(pid)});
  } catch (const SystemError&) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    throw;
  }
}

LauncherClient::~LauncherClient() { stop(base::Deadline::in_seconds(1)); }

void LauncherClient::spawn(int rank, std::uint32_t generation, std::span<const int> fds) {
  send(socket_.get(), bytes_of(Request{rank, generation}), fds);
}

std::optional<Event> LauncherClient::next(base::Deadline deadline) {
  if (!socket_ || wait_ready(socket_.get(), POLLIN, deadline) == 0) return std::nullopt;
  auto message = receive(socket_.get(), base::Deadline::at_ns(0));
  if (!message) return std::nullopt;
  const auto report = packet_of<Report>(*message);
  if (report.kind == Report::Kind::ended)
    return Ended{report.rank, report.generation, report.pid, report.wait_status};
  if (message->fds.size() != 1)
    throw SessionError(
        fmt::format("launcher: runner {} came with {} pidfds", report.rank, message->fds.size()));
  return Started{report.rank, report.generation, report.pid, std::move(message->fds[0])};
}

void LauncherClient::stop(base::Deadline deadline) noexcept {
  if (!process_.pidfd) return;
  // Not only closed: a process forked meanwhile may hold a copy of our end.
  shutdown(socket_.get(), SHUT_RDWR);
  socket_.reset();
  if (!wait_ended(process_.pidfd.get(), deadline)) {
    kill(process_.pid, SIGKILL);
    wait_ended(process_.pidfd.get(), base::Deadline::in_seconds(kill_bound_s));
  }
  take_exit_status();
  process_.pidfd.reset();
}

}  // namespace accelmgr::ipc
