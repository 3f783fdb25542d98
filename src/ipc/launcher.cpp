#include "ipc/launcher.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <signal.h>
#include <stdio_ext.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>

#include "accelmgr/errors.hpp"
#include "base/exception_text.hpp"
#include "base/log.hpp"
#include "ipc/socket.hpp"
#include "ipc/wait_ready.hpp"

namespace accelmgr::ipc {
namespace {

constexpr double kill_bound_s = 2;
constexpr double creator_bound_s = 1;  // For the creator to end by itself.
constexpr double term_bound_s = 0.3;   // For the rest of its group.
constexpr int starved_ms = 50;         // Until a report is sent again for which there was no memory.

// Both ends are the same image: the messages are these bytes.
struct Request {
  enum class Kind : int { spawn, signal, stop };
  Kind kind;
  int rank;  ///< signal: its number.
  std::uint32_t generation;
};

struct Report {
  enum class Kind : int { started, ended };
  Kind kind;
  int rank;
  std::uint32_t generation;
  pid_t pid;
  int wait_status;
  int error;
  std::int64_t time_ns;
};

struct Running {
  int rank;
  std::uint32_t generation;
  pid_t pid;
  std::shared_ptr<const base::UniqueFd> pidfd;
};

/// A report that the client was not ready to read; with the pidfd of a child that has started.
struct Unsent {
  Report report;
  std::shared_ptr<const base::UniqueFd> pidfd;
};

std::int64_t real_time_ns() noexcept {
  timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

template <class Packet>
std::string_view bytes_of(const Packet& packet) noexcept {
  return {reinterpret_cast<const char*>(&packet), sizeof packet};
}

template <class Packet>
Packet packet_of(const std::string& bytes) {
  if (bytes.size() != sizeof(Packet))
    throw SessionError(fmt::format("launcher: a packet of {} bytes was expected, one of {} came",
                                   sizeof(Packet), bytes.size()));
  Packet packet;
  std::memcpy(&packet, bytes.data(), sizeof packet);
  return packet;
}

/// As receive(); of a packet whose descriptors find no room, `no_room` is set and there are the bytes alone.
std::optional<Message> receive_what_fits(int socket, bool& no_room) {
  no_room = false;
  try {
    return receive(socket, base::Deadline::at_ns(0));
  } catch (const SystemError& error) {
    if (error.code() != EMFILE) throw;
    no_room = true;
    return Message{receive_bytes(socket), {}};
  }
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
  } catch (...) {
    fmt::print(stderr, "accelmgr: runner {} ended with an uncaught exception: {}\n", rank,
               base::current_exception_text());
  }
  return exit_uncaught;
}

class Launcher {
 public:
  Launcher(base::UniqueFd socket, const ChildMain& child_main, const LauncherOptions& options)
      : socket_(std::move(socket)), child_main_(child_main), options_(options) {
    if (!options_.adopt_orphans) return;
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    sigset_t child_ended;
    sigemptyset(&child_ended);
    sigaddset(&child_ended, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child_ended, nullptr);
    child_ended_.reset(signalfd(-1, &child_ended, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!child_ended_) throw SystemError("launcher: signalfd", errno);
  }

  void run() {
    while (!client_gone_ && !stopped_ && !has_ended(options_.creator) && !creator_is_late()) {
      wait_for_work();
      reap_ended();
      if (options_.adopt_orphans) reap_orphans();
      send_unsent();
      serve_request();
    }
    const bool ends_creator = options_.creator_group != 0 && !was_asked_to_stop();
    if (ends_creator) end_creator();
    end_children();
    if (ends_creator) end_group_members(options_.creator_group, base::Deadline::in_seconds(term_bound_s));
  }

  void end_children() noexcept {
    for (const auto& running : running_) kill(-running.pid, SIGKILL);
    const auto deadline = base::Deadline::in_seconds(kill_bound_s);
    for (const auto& running : running_)
      if (wait_ended(running.pidfd->get(), deadline)) waitpid(running.pid, nullptr, 0);
    running_.clear();
    if (options_.adopt_orphans) end_all_children(deadline);
  }

 private:
  bool creator_is_late() {
    if (!creator_until_ && has_ended(options_.host))
      creator_until_ = base::Deadline::in_seconds(creator_bound_s);
    return creator_until_ && creator_until_->passed();
  }

  /// Also by what is still to be read: a report may have found the socket closed before that.
  bool was_asked_to_stop() noexcept {
    try {
      for (bool no_room = false; !stopped_;) {
        const auto message = receive_what_fits(socket_.get(), no_room);
        if (!message) break;
        stopped_ = packet_of<Request>(message->bytes).kind == Request::Kind::stop;
      }
    } catch (const Error&) {
      // There is nothing more.
    }
    return stopped_;
  }

  void end_creator() noexcept {
    // It closes its socket a moment before it has ended.
    const auto until = creator_until_.value_or(base::Deadline::in_seconds(creator_bound_s));
    if (wait_ended(options_.creator, until)) return;
    send_signal(options_.creator, SIGKILL);
    wait_ended(options_.creator, base::Deadline::in_seconds(kill_bound_s));
  }

  /// Until there is something to do; -1: for ever.
  int bound_ms() const noexcept {
    if (starved_) return starved_ms;
    return creator_until_
               ? static_cast<int>(std::max<std::int64_t>(creator_until_->remaining_ns(), 0) / 1'000'000) + 1
               : -1;
  }

  void wait_for_work() {
    const auto to_client = static_cast<short>(unsent_.empty() || starved_ ? POLLIN : POLLIN | POLLOUT);
    std::vector<pollfd> entries{{.fd = socket_.get(), .events = to_client, .revents = 0},
                                {.fd = options_.creator, .events = POLLIN, .revents = 0},
                                {.fd = creator_until_ ? -1 : options_.host, .events = POLLIN, .revents = 0},
                                {.fd = child_ended_.get(), .events = POLLIN, .revents = 0}};
    for (const auto& running : running_)
      entries.push_back({.fd = running.pidfd->get(), .events = POLLIN, .revents = 0});
    while (poll(entries.data(), entries.size(), bound_ms()) < 0)
      if (errno != EINTR) throw SystemError("launcher: poll", errno);
  }

  void reap_ended() {
    std::vector<Report> ended;
    for (auto running = running_.begin(); running != running_.end();) {
      if (!has_ended(running->pidfd->get())) {
        ++running;
        continue;
      }
      kill(-running->pid, SIGKILL);  // Before the leader is reaped: until then the group's number is its own.
      Report report{Report::Kind::ended, running->rank, running->generation, running->pid, 0, 0,
                    real_time_ns()};
      waitpid(running->pid, &report.wait_status, 0);
      if (!ended.empty()) report.time_ns = ended.front().time_ns;
      ended.push_back(report);
      running = running_.erase(running);
    }
    // Whose orphan one is the kernel does not tell. While others run it may be theirs.
    if (!ended.empty() && running_.empty() && options_.adopt_orphans)
      end_all_children(base::Deadline::in_seconds(kill_bound_s));
    for (const auto& report : ended) send_report(report);
  }

  /// That ended by themselves.
  void reap_orphans() noexcept {
    for (signalfd_siginfo told; read(child_ended_.get(), &told, sizeof told) > 0;) {
    }
    for (;;) {
      siginfo_t info{};
      if (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) return;
      const auto is_it = [&](const Running& running) { return running.pid == info.si_pid; };
      if (std::any_of(running_.begin(), running_.end(), is_it)) return;  // It ended just now: reap_ended().
      waitpid(info.si_pid, nullptr, 0);
    }
  }

  void serve_request() {
    if (client_gone_ || wait_ready(socket_.get(), POLLIN, base::Deadline::at_ns(0)) == 0) return;
    bool no_room = false;
    auto message = receive_what_fits(socket_.get(), no_room);
    if (!message) {
      client_gone_ = true;
      return;
    }
    const auto request = packet_of<Request>(message->bytes);
    if (request.kind == Request::Kind::stop)
      stopped_ = true;
    else if (request.kind == Request::Kind::signal)
      signal_children(request.rank);
    else if (no_room)
      not_started(request.rank, request.generation, EMFILE);
    else
      spawn({request.rank, request.generation, std::move(message->fds)});
  }

  void signal_children(int number) noexcept {
    for (const auto& running : running_) {
      kill(-running.pid, number);
      kill(-running.pid, SIGCONT);
    }
  }

  void spawn(SpawnRequest request) {
    const int rank = request.rank;
    const auto generation = request.generation;
    try {
      start_child(std::move(request));
    } catch (const SystemError& error) {
      not_started(rank, generation, error.code());
    }
  }

  /// The client says so.
  void not_started(int rank, std::uint32_t generation, int error) {
    send_report(
        {Report::Kind::ended, rank, generation, 0, W_EXITCODE(exit_not_forked, 0), error, real_time_ns()});
  }

  void start_child(SpawnRequest request) {
    const pid_t launcher = getpid();
    // What is buffered would be written by the child too. Beside threads: all of it is the creator's, see
    // become_launcher_beside_threads().
    if (!options_.adopt_orphans) std::fflush(nullptr);
    // A signal that comes before the child has its own dispositions waits for them, and is not lost.
    sigset_t all, before;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, &before);
    const pid_t pid = fork();
    const int error = errno;
    if (pid == 0) become_child(launcher, before, std::move(request));
    sigprocmask(SIG_SETMASK, &before, nullptr);
    if (pid < 0) throw SystemError("fork", error);
    setpgid(pid, pid);  // In the child too: whoever comes first, the group exists for both.
    std::shared_ptr<const base::UniqueFd> pidfd;
    try {
      pidfd = std::make_shared<base::UniqueFd>(open_pidfd(pid));
    } catch (const SystemError&) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
      throw;
    }
    running_.push_back({request.rank, request.generation, pid, pidfd});
    send_report({Report::Kind::started, request.rank, request.generation, pid, 0, 0, real_time_ns()},
                std::move(pidfd));
  }

  [[noreturn]] void become_child(pid_t launcher, const sigset_t& mask, SpawnRequest request) noexcept {
    die_with(launcher);
    setpgid(0, 0);
    if (options_.adopt_orphans)
      default_signals();
    else
      sigprocmask(SIG_SETMASK, &mask, nullptr);
    name_process(fmt::format("{}{}", options_.child_name, request.rank).c_str());
    if (!options_.core_dumps) switch_off_core_dumps();
    socket_.reset();
    child_ended_.reset();
    for (const int pidfd : {options_.creator, options_.host})
      if (pidfd >= 0) close(pidfd);
    running_.clear();
    unsent_.clear();
    const int code = run_child_main(child_main_, std::move(request));
    std::fflush(nullptr);
    _exit(code);
  }

  /// The client may be busy for long, with hundreds of children: reports wait for it here.
  void send_report(const Report& report, std::shared_ptr<const base::UniqueFd> pidfd = {}) {
    unsent_.push_back({report, std::move(pidfd)});
    send_unsent();
  }

  void send_unsent() {
    for (; !unsent_.empty() && !client_gone_; unsent_.pop_front())
      if (!try_send(unsent_.front())) return;
  }

  bool try_send(const Unsent& unsent) {
    const int pidfd = unsent.pidfd ? unsent.pidfd->get() : -1;
    starved_ = false;
    try {
      send(socket_.get(), bytes_of(unsent.report), {&pidfd, unsent.pidfd ? 1U : 0U},
           base::Deadline::at_ns(0));
      return true;
    } catch (const SystemError& error) {
      client_gone_ = peer_is_gone(error);
      starved_ = !client_gone_;
    } catch (const SessionError&) {
      // It reads nothing at the moment.
    }
    return false;
  }

  base::UniqueFd socket_;
  base::UniqueFd child_ended_;  ///< A signalfd; only where orphans are adopted.
  const ChildMain& child_main_;
  const LauncherOptions options_;
  std::vector<Running> running_;
  std::deque<Unsent> unsent_;
  bool client_gone_ = false;
  bool stopped_ = false;  ///< As the client asked it to.
  bool starved_ = false;  ///< The first of `unsent_` could not be sent for want of memory.
  std::optional<base::Deadline> creator_until_;  ///< The host has ended.
};

void check_one_thread() {
  if (thread_count() == 1) return;
  throw UsageError(fmt::format("the launcher is forked from a process of one thread, this one has: {}",
                               fmt::join(thread_names(), ", ")));
}

[[noreturn]] void become_launcher(base::UniqueFd socket, const ChildMain& child_main,
                                  const LauncherOptions& options) noexcept {
  setpgid(0, 0);
  name_process("accelmgr:launch");
  _exit(run_launcher(std::move(socket), child_main, options));
}

}  // namespace

int run_launcher(base::UniqueFd socket, const ChildMain& child_main, const LauncherOptions& options) {
  // Stopped, it would not see the creator's end.
  if (options.creator >= 0) prctl(PR_SET_PDEATHSIG, SIGCONT);
  std::optional<Launcher> launcher;
  try {
    launcher.emplace(std::move(socket), child_main, options);
    launcher->run();
    return 0;
  } catch (const std::exception& error) {
    if (launcher) launcher->end_children();  // First: who reads what is logged may not.
    base::log().error("launcher: {}; its children have ended with it", error.what());
    return 1;
  }
}

void become_launcher_beside_threads(base::UniqueFd socket, const ChildMain& child_main,
                                    const LauncherOptions& options) noexcept {
  setpgid(0, 0);
  default_signals();
  // Whoever ends the whole session or control group this way ends the creator too, and that decides.
  for (const int number : {SIGHUP, SIGINT, SIGQUIT, SIGTERM}) signal(number, SIG_IGN);
  // The creator did not flush: one of its threads may hold the lock of a stream for long (it reads).
  __fpurge(stdout);
  __fpurge(stderr);
  name_process("accelmgr:launch");
  _exit(run_launcher(std::move(socket), child_main, options));
}

LauncherClient LauncherClient::start(const ChildMain& child_main, LauncherOptions options,
                                     std::span<const int> close_in_launcher) {
  check_one_thread();
  auto [ours, theirs] = socket_pair();
  const auto creator = open_pidfd(getpid());
  options.creator = creator.get();
  std::fflush(nullptr);
  const pid_t pid = fork();
  if (pid < 0) throw SystemError("fork of the launcher", errno);
  if (pid == 0) {
    ours.reset();
    for (const int fd : close_in_launcher) close(fd);
    become_launcher(std::move(theirs), child_main, options);
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

LauncherClient LauncherClient::start_beside_threads(const ChildMain& child_main, LauncherOptions options) {
  auto [ours, theirs] = socket_pair();
  const auto creator = open_pidfd(getpid());
  options.creator = creator.get();
  const pid_t pid = fork();
  if (pid < 0) throw SystemError("fork of the launcher", errno);
  if (pid == 0) {
    ours.reset();
    become_launcher_beside_threads(std::move(theirs), child_main, options);
  }
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
  send(socket_.get(), bytes_of(Request{Request::Kind::spawn, rank, generation}), fds);
}

void LauncherClient::signal(int number) {
  send(socket_.get(), bytes_of(Request{Request::Kind::signal, number, 0}));
}

std::optional<Event> LauncherClient::next(base::Deadline deadline) {
  if (!socket_ || wait_ready(socket_.get(), POLLIN, deadline) == 0) return std::nullopt;
  bool no_room = false;
  auto message = receive_what_fits(socket_.get(), no_room);
  if (!message) return std::nullopt;
  const auto report = packet_of<Report>(message->bytes);
  if (report.kind == Report::Kind::ended)
    return Ended{report.rank,        report.generation, report.pid,
                 report.wait_status, report.error,      report.time_ns};
  if (no_room) {
    kill(-report.pid, SIGKILL);  // Without its pidfd nobody here would see its end.
    return Ended{report.rank, report.generation, 0, W_EXITCODE(exit_not_forked, 0), EMFILE, report.time_ns};
  }
  if (message->fds.size() != 1)
    throw SessionError(
        fmt::format("launcher: runner {} came with {} pidfds", report.rank, message->fds.size()));
  return Started{report.rank, report.generation, report.pid, std::move(message->fds[0])};
}

void LauncherClient::stop(base::Deadline deadline) noexcept {
  if (!process_.pidfd) return;
  if (getpid() != owner_) {
    socket_.reset();
    process_.pidfd.reset();
    return;
  }
  try {
    send(socket_.get(), bytes_of(Request{Request::Kind::stop, 0, 0}), {}, base::Deadline::at_ns(0));
  } catch (const Error&) {
    // It is gone, or reads nothing: the end of the socket tells it.
  }
  // Not only closed: a process forked meanwhile may hold a copy of our end.
  shutdown(socket_.get(), SHUT_RDWR);
  socket_.reset();
  send_signal(process_.pidfd.get(), SIGCONT);  // Stopped, it would not see that.
  if (!wait_ended(process_.pidfd.get(), deadline)) {
    send_signal(process_.pidfd.get(), SIGKILL);
    wait_ended(process_.pidfd.get(), base::Deadline::in_seconds(kill_bound_s));
  }
  take_exit_status();
  process_.pidfd.reset();
}

}  // namespace accelmgr::ipc
