#include "engine/client/opening.hpp"

#include <errno.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>
#include <variant>

#include "accelmgr/errors.hpp"
#include "base/config/loader.hpp"
#include "base/errno_text.hpp"
#include "base/interruption.hpp"
#include "base/ipc/socket.hpp"
#include "base/ipc/zygote.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"
#include "engine/client/service_socket.hpp"
#include "engine/manager/interpreter.hpp"
#include "engine/manager/manager.hpp"
#include "engine/manager/role.hpp"
#include "engine/session/layout.hpp"

namespace accelmgr::client {
namespace {

ipc::Child execute_program(const std::vector<std::string>& command, const base::UniqueFd& socket) {
  const std::pair<int, int> inherited[] = {{socket.get(), manager::role_socket}};
  if (command.empty()) return ipc::execute_self({manager::role_argument}, inherited);
  return ipc::execute(command, {manager::role_argument}, inherited);
}

constexpr const char* begins = "begins";  ///< A fork says so when the interpreter works in it.

/// Forks a manager. nullopt if it does not begin in time, or dies.
std::optional<Link> fork_once(double patience_s) {
  auto [ours, theirs] = ipc::socket_pair();
  ipc::Child child;
  ipc::on_new_thread([&, &ours = ours, &theirs = theirs] {
    manager::interpreter().around_fork([&] {
      child = ipc::fork_self([&] {
        ours.reset();
        // In the fork the stack of the thread that waits here is free: the next thread may have it.
        auto socket = std::move(theirs);
        manager::interpreter().forked([&socket] {
          ipc::send(socket.get(), begins);
          manager::run(std::move(socket), {}, manager::Image::forked);
        });
      });
    });
  });
  theirs.reset();
  try {
    if (ipc::receive(ours.get(), base::Deadline::in_seconds(patience_s)))
      return Link(std::move(ours), std::move(child));
  } catch (const SessionError&) {
    // The deadline.
  }
  ipc::end_group(child, base::Deadline::at_ns(0));
  return std::nullopt;
}

Link fork_here() {
  for (const double patience_s : timing::fork_begins_s) {
    if (auto link = fork_once(patience_s)) return std::move(*link);
    base::log().info("a fork of this process did not begin within {} s", patience_s);
  }
  throw ForkHangs(fmt::format(
      "{} forks of this process did not begin: they wait for a lock that another thread held when they were "
      "forked",
      std::size(timing::fork_begins_s)));
}

std::string describe_death(std::string_view seen, std::string_view how) {
  return fmt::format("{} (the manager process: {})", seen, how);
}

Link execute(const Origin& origin) {
  if (origin.command.empty() && origin.method == StartMethod::forkserver) {
    auto served = ipc::fork_from_zygote(manager::server_role);
    return {std::move(served.socket), std::move(served.process), std::move(served.status)};
  }
  if (origin.command.empty() && origin.method == StartMethod::fork) return fork_here();
  auto [ours, theirs] = ipc::socket_pair();
  auto child = execute_program(origin.command, theirs);
  return {std::move(ours), std::move(child)};
}

/// Takes in what the manager says until its runners are ready, or until it has failed. `wait` blocks until
/// there is something to take.
std::optional<protocol::Failed> hear(Link& link, base::Deadline deadline, const std::function<void()>& wait,
                                     const OnOpening& on_opening) {
  for (;;) {
    wait();
    auto answer = protocol::receive_answer(link.socket(), deadline);
    if (auto* failed = std::get_if<protocol::Failed>(&answer)) return std::move(*failed);
    if (auto* started = std::get_if<protocol::Started>(&answer)) {
      link.take_in(std::move(*started));
      return std::nullopt;
    }
    auto& opening = std::get<protocol::Opening>(answer);
    link.take_lease(opening.tenure, opening.lease);
    on_opening(std::move(opening));
    if (!link.is_of_service()) protocol::send_noted(link.socket());
  }
}

/// Blocks until the manager has said something. Throws SessionError.
void wait_for_answer(const Link& link, double start_timeout_s, base::Deadline deadline) {
  for (bool hears = false; !hears; hears = link.hears_soon(deadline)) {
    if (base::interrupted()) {
      link.kill();
      throw SessionError("the manager was interrupted while it started");
    }
    if (deadline.passed())
      throw SessionError(
          fmt::format("the manager process was not ready within start_timeout ({} s): it is still making "
                      "the model and the data source. Set start_timeout to more than they take",
                      start_timeout_s));
  }
  if (!ipc::is_readable(link.socket())) throw SessionError("the manager process ended before it was ready");
}

/// For a start that has failed: lets go of the manager. How it ended, if it had died.
std::optional<std::string> end_of_dead(Link& link) noexcept {
  // The socket of a manager ends a moment before its process does, unless a child of it has a copy.
  const auto patience = ipc::is_closed(link.socket()) ? timing::manager_stop_s : 0;
  const bool died = link.wait_until_manager_ended(base::Deadline::in_seconds(patience));
  link.close();  // If the manager still lives, it stops: it has no host any more.
  auto how = link.end();
  return died ? std::optional(std::move(how)) : std::nullopt;
}

Link bring_up(Link link, const protocol::Begin& begin, double start_timeout_s,
              const std::vector<int>& session, const std::function<void()>& free_session,
              const OnOpening& on_opening) {
  std::optional<protocol::Failed> failed;
  try {
    protocol::send_begin(link.socket(), begin, session);
    if (!session.empty()) {
      free_session();
      protocol::send_free(link.socket());
    }
    const auto deadline = base::Deadline::in_seconds(start_timeout_s + timing::manager_stop_s);
    const auto wait = [&] { wait_for_answer(link, start_timeout_s, deadline); };
    failed = hear(link, deadline, wait, on_opening);
    if (!failed) return link;
  } catch (const SessionError& error) {
    if (const auto how = end_of_dead(link)) throw SessionError(describe_death(error.what(), *how));
    throw;
  } catch (const SystemError& error) {
    const bool closed = ipc::peer_is_gone(error);
    if (const auto how = end_of_dead(link); how && closed)
      throw SessionError(describe_death("the manager closed its socket before it was ready", *how));
    throw;
  } catch (...) {
    link.close();
    link.end();
    throw;
  }
  // The manager has said why. How its process ends adds nothing.
  link.close();
  link.end();
  protocol::raise(*failed);
}

constexpr std::int64_t answer_ns = 1'000'000'000;

/// What a name may have in a line of a header.
std::string header_text(std::string_view name) {
  std::string text;
  for (const char c : name.substr(0, 64))
    if (c > ' ' && c < 127) text += c;
  return text;
}

/// Throws SessionError unless this process may open as many descriptors as an attached host has. One that the
/// service has admitted, but that cannot take them, would keep others out until it has ended.
void check_descriptors() {
  constexpr std::size_t needed =
      2 * session::max_ranks + 8;  // Memory and pidfd of each rank, and the others.
  std::vector<base::UniqueFd> fds;
  while (fds.size() < needed) {
    fds.emplace_back(open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (!fds.back())
      throw SessionError(
          fmt::format("attaching takes up to {} descriptors, but this process may open only {} "
                      "more: {}",
                      needed, fds.size() - 1, base::errno_text(errno)));
  }
}

/// Whether the service may admit this host soon.
bool passes(const ServiceAnswer& answer) {
  const auto code = error_code(answer);
  return code == "not_ready" || code == "host_is_ending" || code == "service_drives";
}

}  // namespace

Link start_manager(const Config& config, const Origin& origin, const OnOpening& opening) {
  return bring_up(
      execute(origin), {.configuration = config::to_yaml(config)}, config.start_timeout, {}, [] {}, opening);
}

Link start_manager_again(const Config& config, const Origin& origin, const std::vector<int>& session,
                         bool reads_again, const std::function<void()>& free_session) {
  return bring_up(execute(origin), {.configuration = config::to_yaml(config), .reads_again = reads_again},
                  config.start_timeout, session, free_session, [](const protocol::Opening&) {});
}

Link attach(const std::string& path, const Attaching& how, const OnOpening& opening) {
  check_descriptors();
  const auto deadline = base::Deadline::in_seconds(how.patience_s);
  const auto name = header_text(how.name.empty() ? program_invocation_short_name : how.name);
  const auto head = fmt::format(
      "Connection: Upgrade\r\nUpgrade: accelmgr-host\r\nAccelmgr-Build: {:016x}\r\nAccelmgr-Host: {}\r\n",
      protocol::build_fingerprint(), name);
  for (;;) {
    // A service that runs answers within a second: what keeps it from admitting this host is in the answer.
    const auto answered = base::Deadline::at_ns(std::max(deadline.ns(), base::now_ns() + answer_ns));
    auto socket = ServiceSocket::connect(path, answered);
    auto answer = socket.ask("GET", "/v1/attach", head, "", answered);
    if (answer.status == 101 && !answer.fd)
      throw SessionError(fmt::format(
          "the service at '{}' has admitted this host, but its descriptor did not arrive: this process may "
          "open no more descriptors",
          path));
    if (answer.status == 101) {
      const auto soon = base::Deadline::in_seconds(timing::first_words_s);
      Link link(std::move(answer.fd), socket.take_service());
      if (const auto failed = hear(
              link, soon, [] {}, opening))
        protocol::raise(*failed);
      return link;
    }
    if (!passes(answer) || deadline.passed() || base::interrupted())
      throw SessionError(
          fmt::format("the service at '{}' does not admit this host: {}", path, error_text(answer)));
    // The runners still start, or the host before still ends. The service sends no message when that is done.
    const timespec look{.tv_sec = 0, .tv_nsec = timing::look_ns};
    nanosleep(&look, nullptr);
  }
}

}  // namespace accelmgr::client
