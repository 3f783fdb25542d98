#include "base/ipc/fork_server.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <stdio_ext.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/exception_text.hpp"
#include "base/ipc/fork_server_messages.hpp"
#include "base/ipc/leftovers.hpp"
#include "base/ipc/orphans.hpp"
#include "base/ipc/process.hpp"
#include "base/ipc/socket.hpp"
#include "base/ipc/wait_ready.hpp"
#include "base/log.hpp"
#include "base/real_time.hpp"
#include "base/refusals.hpp"
#include "base/timing.hpp"

namespace accelmgr::ipc {
namespace {

using fork_server::bytes_of;
using fork_server::check;
using fork_server::packet_of;
using fork_server::Report;
using fork_server::Request;

struct Running {
  int rank;
  std::uint32_t generation;
  pid_t pid;
  std::shared_ptr<const base::UniqueFd> pidfd;
};

/// A report that is not sent yet, because the client does not read; with the pidfd of a child that started.
struct Unsent {
  Report report;
  std::shared_ptr<const base::UniqueFd> pidfd;
};

Request request_of(const Message& message) {
  const auto request = packet_of<Request>(message.bytes);
  const bool known = request.kind == Request::Kind::spawn || request.kind == Request::Kind::signal ||
                     request.kind == Request::Kind::stop;
  check(known, "client", "the kind of request", static_cast<int>(request.kind), "0, 1 or 2");
  if (request.kind == Request::Kind::spawn)
    check(request.rank >= 0, "client", "the rank to start", request.rank, "0 or more");
  if (request.kind == Request::Kind::signal)
    check(request.rank >= 1 && request.rank <= SIGRTMAX, "client", "the signal to send", request.rank,
          fmt::format("1 to {}", SIGRTMAX));
  return request;
}

void switch_off_core_dumps() noexcept {
  rlimit limit{};
  getrlimit(RLIMIT_CORE, &limit);
  // One byte is less than any core. Unlike with 0, the kernel does not start a core_pattern program either.
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

/// What the fork server was forked from, or was itself before.
enum class Origin {
  one_thread,      ///< A process of one thread. Children inherit its signal dispositions and its mask.
  beside_threads,  ///< A process that may have threads. Children begin with default signals.
};

class ForkServer {
 public:
  ForkServer(base::UniqueFd socket, const ChildMain& child_main, const ForkServerOptions& options,
             Origin origin)
      : socket_(std::move(socket)), child_main_(child_main), options_(options), origin_(origin) {
    if (options_.adopt_orphans) orphans_.emplace();
  }

  void run() {
    while (!client_gone_ && !stopped_ && !has_ended(options_.creator) && !creator_is_late()) {
      wait_for_work();
      reap_ended();
      if (orphans_) orphans_->reap_ended([this](pid_t pid) { return is_running(pid); });
      send_unsent();
      serve_request();
    }
    const bool ends_creator =
        (options_.creator_group != 0 || !options_.creator_mark.empty()) && !was_asked_to_stop();
    if (ends_creator) end_creator();
    end_children();
    if (!ends_creator) return;
    const auto term_until = base::Deadline::in_seconds(timing::group_end_s);
    if (options_.creator_group != 0) end_group_members(options_.creator_group, term_until);
    if (!options_.creator_mark.empty()) end_marked(options_.creator_mark, term_until);
  }

  void end_children() noexcept {
    for (const auto& running : running_) kill(-running.pid, SIGKILL);
    const auto deadline = base::Deadline::in_seconds(timing::fork_server_kill_s);
    for (const auto& running : running_)
      if (wait_ended(running.pidfd->get(), deadline)) waitpid(running.pid, nullptr, 0);
    running_.clear();
    if (orphans_) orphans_->end_all(deadline);
  }

 private:
  bool creator_is_late() {
    if (!creator_until_ && has_ended(options_.host))
      creator_until_ = base::Deadline::in_seconds(timing::creator_ends_s);
    return creator_until_ && creator_until_->passed();
  }

  /// Reads the remaining requests first: sending a report may have found the socket closed before the stop
  /// was read.
  bool was_asked_to_stop() noexcept {
    try {
      while (!stopped_) {
        const auto message = receive_what_fits(socket_.get(), base::Deadline::at_ns(0));
        if (!message) break;
        stopped_ = packet_of<Request>(message->bytes).kind == Request::Kind::stop;
      }
    } catch (const Error&) {
      // There is nothing more to read.
    }
    return stopped_;
  }

  void end_creator() noexcept {
    // A creator that exits closes its socket a moment before its pidfd is readable.
    const auto until = creator_until_.value_or(base::Deadline::in_seconds(timing::creator_ends_s));
    if (wait_ended(options_.creator, until)) return;
    send_signal(options_.creator, SIGKILL);
    wait_ended(options_.creator, base::Deadline::in_seconds(timing::fork_server_kill_s));
  }

  /// How long wait_for_work() may block; -1: without a bound.
  int bound_ms() const noexcept {
    if (starved_) return timing::report_again_ms;
    return creator_until_
               ? static_cast<int>(std::max<std::int64_t>(creator_until_->remaining_ns(), 0) / 1'000'000) + 1
               : -1;
  }

  void wait_for_work() {
    const auto to_client = static_cast<short>(unsent_.empty() || starved_ ? POLLIN : POLLIN | POLLOUT);
    std::vector<pollfd> entries{{.fd = socket_.get(), .events = to_client, .revents = 0},
                                {.fd = options_.creator, .events = POLLIN, .revents = 0},
                                {.fd = creator_until_ ? -1 : options_.host, .events = POLLIN, .revents = 0},
                                {.fd = orphans_ ? orphans_->ended() : -1, .events = POLLIN, .revents = 0}};
    for (const auto& running : running_)
      entries.push_back({.fd = running.pidfd->get(), .events = POLLIN, .revents = 0});
    while (poll(entries.data(), entries.size(), bound_ms()) < 0)
      if (errno != EINTR) throw SystemError("fork server: poll", errno);
  }

  void reap_ended() {
    // Finds all ended children before it reaps one: other ends to which that leads are left to the next pass.
    const auto first = std::stable_partition(running_.begin(), running_.end(), [](const Running& running) {
      return !has_ended(running.pidfd->get());
    });
    const auto seen_ns = base::real_time_ns();
    std::vector<Report> ended;
    for (auto running = first; running != running_.end(); ++running) {
      kill(-running->pid, SIGKILL);  // Before the leader is reaped: until then no other group has its number.
      Report report{Report::Kind::ended, running->rank, running->generation, running->pid, 0, 0, seen_ns};
      waitpid(running->pid, &report.wait_status, 0);
      ended.push_back(report);
    }
    running_.erase(first, running_.end());
    // The kernel does not say whose orphan a process is. While other children run, it may be theirs.
    if (orphans_ && !ended.empty() && running_.empty())
      orphans_->end_all(base::Deadline::in_seconds(timing::fork_server_kill_s));
    for (const auto& report : ended) send_report(report);
  }

  /// Also true for a child that has ended and is left to reap_ended().
  bool is_running(pid_t pid) const noexcept {
    return std::ranges::any_of(running_, [pid](const Running& running) { return running.pid == pid; });
  }

  void serve_request() {
    if (client_gone_ || wait_ready(socket_.get(), POLLIN, base::Deadline::at_ns(0)) == 0) return;
    try {
      auto message = receive_what_fits(socket_.get(), base::Deadline::at_ns(0));
      if (message)
        serve(*message);
      else
        client_gone_ = true;
    } catch (const SessionError& error) {
      refusals_.note(error.what());
    }
  }

  void serve(Message& message) {
    const auto request = request_of(message);
    if (request.kind == Request::Kind::stop)
      stopped_ = true;
    else if (request.kind == Request::Kind::signal)
      signal_children(request.rank);
    else if (!message.missing.empty())
      not_started(request.rank, request.generation, EMFILE);
    else
      spawn({request.rank, request.generation, std::move(message.fds)});
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

  /// Reports the failure to the client, which logs it.
  void not_started(int rank, std::uint32_t generation, int error) {
    send_report({Report::Kind::ended, rank, generation, 0, W_EXITCODE(exit_not_forked, 0), error,
                 base::real_time_ns()});
  }

  void start_child(SpawnRequest request) {
    const pid_t fork_server = getpid();
    // Flush, or the child would write buffered output a second time. A fork server beside threads has none of
    // its own: become_fork_server_beside_threads() drops the creator's.
    if (origin_ == Origin::one_thread) std::fflush(nullptr);
    // Signals are blocked until the child has its own dispositions, so that none is lost.
    sigset_t all, before;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, &before);
    const pid_t pid = fork();
    const int error = errno;
    if (pid == 0) become_child(fork_server, before, std::move(request));
    sigprocmask(SIG_SETMASK, &before, nullptr);
    if (pid < 0) throw SystemError("fork", error);
    setpgid(pid, pid);  // The child does the same: the group exists for both, whichever process runs first.
    std::shared_ptr<const base::UniqueFd> pidfd;
    try {
      pidfd = std::make_shared<base::UniqueFd>(open_pidfd(pid));
    } catch (const SystemError&) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
      throw;
    }
    running_.push_back({request.rank, request.generation, pid, pidfd});
    send_report({Report::Kind::started, request.rank, request.generation, pid, 0, 0, base::real_time_ns()},
                std::move(pidfd));
  }

  [[noreturn]] void become_child(pid_t fork_server, const sigset_t& mask, SpawnRequest request) noexcept {
    die_with(fork_server);
    setpgid(0, 0);
    if (origin_ == Origin::beside_threads)
      default_signals();
    else
      sigprocmask(SIG_SETMASK, &mask, nullptr);
    orphans_.reset();
    name_process(fmt::format("{}{}", options_.child_name, request.rank).c_str());
    if (!options_.core_dumps) switch_off_core_dumps();
    socket_.reset();
    for (const int pidfd : {options_.creator, options_.host})
      if (pidfd >= 0) close(pidfd);
    running_.clear();
    unsent_.clear();
    const int code = run_child_main(child_main_, std::move(request));
    std::fflush(nullptr);
    _exit(code);
  }

  /// The client may be busy for long, and have hundreds of children: reports wait here until it reads them.
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
      // The client does not read at the moment.
    }
    return false;
  }

  base::UniqueFd socket_;
  const ChildMain& child_main_;
  const ForkServerOptions options_;
  const Origin origin_;
  std::optional<Orphans> orphans_;  ///< Only if the options ask for it.
  std::vector<Running> running_;
  std::deque<Unsent> unsent_;
  base::Refusals refusals_;
  bool client_gone_ = false;
  bool stopped_ = false;  ///< The client asked for it.
  bool starved_ = false;  ///< The first of `unsent_` could not be sent, for example for want of memory.
  std::optional<base::Deadline> creator_until_;  ///< The creator must end by then: the host has ended.
};

int run(base::UniqueFd socket, const ChildMain& child_main, const ForkServerOptions& options, Origin origin) {
  // A stopped fork server would not see the creator's end, so the kernel continues it then.
  if (options.creator >= 0) prctl(PR_SET_PDEATHSIG, SIGCONT);
  std::optional<ForkServer> fork_server;
  try {
    options.begin();
    fork_server.emplace(std::move(socket), child_main, options, origin);
    fork_server->run();
    return 0;
  } catch (const std::exception& error) {
    if (fork_server) fork_server->end_children();  // First: logging blocks if the log's reader does not read.
    base::log().error("fork server: {}; its children have ended with it", error.what());
    return 1;
  }
}

}  // namespace

int run_fork_server(base::UniqueFd socket, const ChildMain& child_main, const ForkServerOptions& options) {
  return run(std::move(socket), child_main, options, Origin::one_thread);
}

void become_fork_server(base::UniqueFd socket, const ChildMain& child_main,
                        const ForkServerOptions& options) noexcept {
  setpgid(0, 0);
  name_process("accelmgr:fork");
  _exit(run_fork_server(std::move(socket), child_main, options));
}

void become_fork_server_beside_threads(base::UniqueFd socket, const ChildMain& child_main,
                                       const ForkServerOptions& options) noexcept {
  setpgid(0, 0);
  default_signals();
  // These signals often go to a whole session or control group. Then the creator gets them too, and the
  // fork server ends when the creator does.
  for (const int number : {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2}) signal(number, SIG_IGN);
  // Drop output that the creator has buffered. It could not flush before the fork, because one of its threads
  // may hold the lock of a stream for long.
  __fpurge(stdout);
  __fpurge(stderr);
  name_process("accelmgr:fork");
  _exit(run(std::move(socket), child_main, options, Origin::beside_threads));
}

}  // namespace accelmgr::ipc
