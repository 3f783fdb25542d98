#include "base/ipc/fork_server_client.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <string>
#include <utility>

#include "accelmgr/errors.hpp"
#include "base/ipc/fork_server_messages.hpp"
#include "base/ipc/socket.hpp"
#include "base/ipc/wait_ready.hpp"
#include "base/real_time.hpp"
#include "base/timing.hpp"

namespace accelmgr::ipc {
namespace {

using fork_server::bytes_of;
using fork_server::check;
using fork_server::packet_of;
using fork_server::Report;
using fork_server::Request;

/// Throws SessionError for an invalid report, and for a rank that is not in `asked_for`.
Report report_of(const Message& message, const std::set<int>& asked_for) {
  constexpr const char* child = "child";
  constexpr int last_errno = 4095;
  const auto report = packet_of<Report>(message.bytes);
  const bool started = report.kind == Report::Kind::started;
  check(started || report.kind == Report::Kind::ended, child, "the kind of report",
        static_cast<int>(report.kind), "0 or 1");
  check(asked_for.contains(report.rank), child, "its rank", report.rank, "one that was asked for");
  // A signal to process group 0 or 1 would reach this process's own group, or all processes.
  check(report.pid > 1 || (!started && report.pid == 0), child, "its pid", report.pid, "more than 1");
  check(report.wait_status >= 0 && report.wait_status <= 0xffff, child, "its wait status", report.wait_status,
        "0 to 65535");
  check(report.error >= 0 && report.error <= last_errno, child, "its errno", report.error, "0 to 4095");
  check(report.time_ns >= 0, child, "the time of its report", report.time_ns, "0 or more");
  const std::size_t pidfds = started && message.missing.empty() ? 1 : 0;
  check(message.fds.size() == pidfds, child, "the number of its descriptors",
        static_cast<std::int64_t>(message.fds.size()), std::to_string(pidfds));
  return report;
}

std::int64_t ns(double seconds) { return static_cast<std::int64_t>(seconds * 1e9); }

/// Forks this process. The child calls become(socket, options), which must not return.
template <class Become>
ForkServerClient fork_off(ForkServerOptions options, Become become) {
  auto [ours, theirs] = socket_pair();
  const auto creator = open_pidfd(getpid());
  options.creator = creator.get();
  const pid_t pid = fork();
  if (pid < 0) throw SystemError("forking the fork server", errno);
  if (pid == 0) {
    ours.reset();
    become(std::move(theirs), options);
  }
  setpgid(pid, pid);  // The fork server does the same, whichever process runs first.
  try {
    return ForkServerClient(std::move(ours), Child{pid, open_pidfd(pid)});
  } catch (const SystemError&) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    throw;
  }
}

}  // namespace

ForkServerClient ForkServerClient::start(const ChildMain& child_main, ForkServerOptions options,
                                         std::span<const int> close_in_fork_server) {
  std::fflush(nullptr);
  return fork_off(std::move(options), [&](base::UniqueFd socket, const ForkServerOptions& own) {
    for (const int fd : close_in_fork_server) close(fd);
    become_fork_server(std::move(socket), child_main, own);
  });
}

ForkServerClient ForkServerClient::start_beside_threads(const ChildMain& child_main,
                                                        ForkServerOptions options) {
  return fork_off(std::move(options), [&](base::UniqueFd socket, const ForkServerOptions& own) {
    become_fork_server_beside_threads(std::move(socket), child_main, own);
  });
}

ForkServerClient::ForkServerClient(base::UniqueFd socket, Child process)
    : socket_(std::move(socket)), process_(std::move(process)) {
  ready_.add(socket_.get());
  ready_.add(process_.pidfd.get());
}

ForkServerClient::~ForkServerClient() { stop(base::Deadline::in_seconds(timing::fork_server_end_s)); }

void ForkServerClient::spawn(int rank, std::uint32_t generation, std::span<const int> fds) {
  send(socket_.get(), bytes_of(Request{Request::Kind::spawn, rank, generation}), fds);
  asked_for_.insert(rank);
  children_[rank] = {.generation = generation, .process = {}, .ended_ns = 0};
}

void ForkServerClient::signal(int number) {
  send(socket_.get(), bytes_of(Request{Request::Kind::signal, number, 0}));
}

std::optional<int> ForkServerClient::server_exit(base::Deadline deadline) noexcept {
  if (!server_exit_ && wait_ended(process_.pidfd.get(), deadline)) {
    server_exit_ = take_exit_status(process_.pidfd.get()).value_or(unknown_exit);
    ready_.remove(process_.pidfd.get());
    ready_.remove(socket_.get());
    kill_children();
  }
  return server_exit_;
}

void ForkServerClient::kill_children() noexcept {
  for (const auto& [rank, child] : children_)
    if (child.process.pidfd) send_group_signal(child.process.pidfd.get(), child.process.pid, SIGKILL);
}

std::optional<Event> ForkServerClient::next(base::Deadline deadline) {
  for (;;) {
    if (auto event = take(base::now_ns())) return event;
    if (!socket_ || deadline.passed() || (server_exit_ && children_.empty())) return std::nullopt;
    wait_ready(descriptor(), POLLIN, deadline);
  }
}

std::optional<Event> ForkServerClient::take(std::int64_t now_ns) {
  if (!socket_) return std::nullopt;
  const bool is_last_look = server_exit().has_value();  // No report follows those that are here now.
  if (auto event = take_report()) return event;
  if (!is_last_look) end_server_without_socket(now_ns);
  if (auto event = take_unreported(now_ns)) return event;
  wake_for_what_is_overdue(now_ns);
  return std::nullopt;
}

std::optional<Event> ForkServerClient::take_report() {
  while (is_readable(socket_.get())) {
    try {
      auto message = receive_what_fits(socket_.get(), base::Deadline::at_ns(0));
      if (!message) return std::nullopt;
      if (auto event = event_of(*message)) return event;
    } catch (const SessionError& error) {
      refusals_.note(error.what());
    }
  }
  return std::nullopt;
}

std::optional<Event> ForkServerClient::event_of(Message& message) {
  const auto report = report_of(message, asked_for_);
  const auto found = children_.find(report.rank);
  if (found == children_.end() || found->second.generation != report.generation) return std::nullopt;
  auto& child = found->second.process;
  const Ended ended{report.rank,        report.generation, report.pid,
                    report.wait_status, report.error,      report.time_ns};
  if (report.kind == Report::Kind::ended) {
    if (report.pid != child.pid) return std::nullopt;
    forget(found);
    return ended;
  }
  if (child.pid != 0) throw SessionError(fmt::format("the fork server: rank {} has a child", report.rank));
  try {
    if (!message.missing.empty()) throw SystemError("receiving the pidfd of a child", EMFILE);
    child = {report.pid, base::duplicate(message.fds[0].get())};
    ready_.add(child.pidfd.get());
  } catch (const SystemError& error) {
    kill(-report.pid, SIGKILL);  // Without its pidfd this process would not see its end.
    forget(found);
    return Ended{report.rank,  report.generation, 0, W_EXITCODE(exit_not_forked, 0),
                 error.code(), report.time_ns};
  }
  return Started{report.rank, report.generation, report.pid, std::move(message.fds[0])};
}

/// A fork server that has closed its socket is ending. One that does not end hangs, and is killed.
void ForkServerClient::end_server_without_socket(std::int64_t now_ns) noexcept {
  if (killed_ || !is_closed(socket_.get())) return;
  if (closed_ns_ == 0) {
    closed_ns_ = now_ns;
    ready_.remove(socket_.get());
  }
  if (now_ns - closed_ns_ < ns(timing::fork_server_kill_s)) return;
  killed_ = true;
  send_signal(process_.pidfd.get(), SIGKILL);
}

std::optional<Event> ForkServerClient::take_unreported(std::int64_t now_ns) {
  for (auto& [rank, child] : children_) {
    const bool has_process = child.process.pidfd.get() >= 0;
    if (has_process && child.ended_ns == 0 && has_ended(child.process.pidfd.get())) {
      child.ended_ns = now_ns;
      ready_.remove(child.process.pidfd.get());
    }
    const bool is_over = server_exit_
                             ? !has_process || child.ended_ns != 0
                             : child.ended_ns != 0 && now_ns - child.ended_ns >= ns(timing::end_report_s);
    if (!is_over) continue;
    const Ended ended{.rank = rank,
                      .generation = child.generation,
                      .pid = child.process.pid,
                      .wait_status = server_exit_ ? SIGKILL : unknown_exit,
                      .error = 0,
                      .time_ns = base::real_time_ns(),
                      .with_server = server_exit_.has_value()};
    forget(children_.find(rank));
    return ended;
  }
  return std::nullopt;
}

/// Sets when take() must be called again, though no descriptor says so: a report or an end is overdue then.
void ForkServerClient::wake_for_what_is_overdue(std::int64_t now_ns) noexcept {
  std::int64_t next_ns = 0;
  const auto wake_at = [&](std::int64_t at_ns) { next_ns = next_ns == 0 ? at_ns : std::min(next_ns, at_ns); };
  if (closed_ns_ != 0 && !killed_) wake_at(closed_ns_ + ns(timing::fork_server_kill_s));
  for (const auto& [rank, child] : children_)
    if (child.ended_ns != 0) wake_at(child.ended_ns + ns(timing::end_report_s));
  ready_.wake_in(next_ns == 0 ? 0 : std::max<std::int64_t>(next_ns - now_ns, 1));
}

void ForkServerClient::forget(std::map<int, Asked>::iterator child) noexcept {
  ready_.remove(child->second.process.pidfd.get());
  children_.erase(child);
}

void ForkServerClient::stop(base::Deadline deadline) noexcept {
  if (!process_.pidfd) return;
  if (getpid() != owner_) {
    socket_.reset();
    process_.pidfd.reset();
    ready_.close();
    children_.clear();
    return;
  }
  try {
    send(socket_.get(), bytes_of(Request{Request::Kind::stop, 0, 0}), {}, base::Deadline::at_ns(0));
  } catch (const Error&) {
    // The fork server is gone or does not read. The end of the socket tells it too.
  }
  // Closing is not enough: a process that was forked meanwhile may hold a copy of this end.
  shutdown(socket_.get(), SHUT_RDWR);
  socket_.reset();
  send_signal(process_.pidfd.get(), SIGCONT);  // A stopped fork server would not see the end of the socket.
  if (!wait_ended(process_.pidfd.get(), deadline)) {
    send_signal(process_.pidfd.get(), SIGKILL);
    wait_ended(process_.pidfd.get(), base::Deadline::in_seconds(timing::fork_server_kill_s));
  }
  const auto children_end = base::Deadline::in_seconds(timing::fork_server_kill_s);
  server_exit();
  for (const auto& [rank, child] : children_)
    if (child.process.pidfd) wait_ended(child.process.pidfd.get(), children_end);
  children_.clear();
  process_.pidfd.reset();
  ready_.close();
}

}  // namespace accelmgr::ipc
