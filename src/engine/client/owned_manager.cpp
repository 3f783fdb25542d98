#include "engine/client/owned_manager.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>
#include <string_view>
#include <utility>
#include <variant>

#include "accelmgr/errors.hpp"
#include "base/config/loader.hpp"
#include "base/interruption.hpp"
#include "base/ipc/socket.hpp"
#include "base/ipc/wait_ready.hpp"
#include "base/ipc/zygote.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"
#include "engine/manager/interpreter.hpp"
#include "engine/manager/process.hpp"
#include "engine/manager/role.hpp"

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

std::optional<int> reaped_status(pid_t pid) noexcept {
  int status = 0;
  return waitpid(pid, &status, 0) == pid ? std::optional(status) : std::nullopt;
}

/// Reads the status from the zygote, which sends it at once. Returns nullopt if the zygote does not
/// send it, because it has died or is stopped.
std::optional<int> told_status(int pipe) noexcept {
  int status = 0;
  if (ipc::wait_ready(pipe, POLLIN, base::Deadline::in_seconds(timing::manager_status_s)) == 0)
    return std::nullopt;
  return read(pipe, &status, sizeof status) == sizeof status ? std::optional(status) : std::nullopt;
}

std::string describe_death(std::string_view seen, std::string_view how) {
  return fmt::format("{} (the manager process: {})", seen, how);
}

}  // namespace

OwnedManager OwnedManager::execute(const Origin& origin) {
  if (origin.command.empty() && origin.method == StartMethod::forkserver) {
    auto served = ipc::fork_from_zygote(manager::server_role);
    return {Link(std::move(served.socket), std::move(served.process)), std::move(served.status)};
  }
  if (origin.command.empty() && origin.method == StartMethod::fork) return {fork_here(), {}};
  auto [ours, theirs] = ipc::socket_pair();
  auto child = execute_program(origin.command, theirs);
  return {Link(std::move(ours), std::move(child)), {}};
}

std::optional<std::string> OwnedManager::end_of_dead() noexcept {
  // The socket of a manager ends a moment before its process does, unless a child of it has a copy.
  const auto patience = ipc::is_closed(link_.socket()) ? timing::manager_stop_s : 0;
  const bool died = link_.wait_until_manager_ended(base::Deadline::in_seconds(patience));
  link_.close();  // If the manager still lives, it stops: it has no host any more.
  auto how = end();
  return died ? std::optional(std::move(how)) : std::nullopt;
}

std::variant<protocol::Started, protocol::Failed> OwnedManager::receive_started(
    double start_timeout_s, const std::function<bool()>& interrupted, const Events& events) const {
  const auto deadline = base::Deadline::in_seconds(start_timeout_s + timing::manager_stop_s);
  for (;;) {
    for (bool hears = false; !hears; hears = link_.hears_within(deadline)) {
      if (interrupted && interrupted()) {
        link_.kill();
        throw SessionError("the manager was interrupted while it started");
      }
      if (deadline.passed())
        throw SessionError(
            fmt::format("the manager process was not ready within start_timeout ({} s): it is still making "
                        "the model and the data source. Set start_timeout to more than they take",
                        start_timeout_s));
    }
    if (!ipc::is_readable(link_.socket()))
      throw SessionError("the manager process ended before it was ready");
    auto answer = protocol::receive_answer(link_.socket(), deadline);
    if (auto* failed = std::get_if<protocol::Failed>(&answer)) return std::move(*failed);
    if (auto* started = std::get_if<protocol::Started>(&answer)) return std::move(*started);
    if (const auto* assigned = std::get_if<protocol::Assigned>(&answer)) {
      events.assigned(*assigned);
      continue;
    }
    events.prepared(std::move(std::get<protocol::Prepared>(answer)));
    protocol::take_note_of_prepared(link_.socket());
  }
}

void OwnedManager::bring_up(const Config& config, const std::vector<int>& session,
                            const std::function<void()>& free_session,
                            const std::function<bool()>& interrupted, const Events& events) {
  std::variant<protocol::Started, protocol::Failed> answer;
  try {
    protocol::send_configuration(link_.socket(), config::to_yaml(config));
    protocol::send_begin(link_.socket(), session);
    if (!session.empty()) {
      free_session();
      protocol::send_free(link_.socket());
    }
    answer = receive_started(config.start_timeout, interrupted, events);
    if (auto* started = std::get_if<protocol::Started>(&answer)) return link_.take_in(std::move(*started));
  } catch (const SessionError& error) {
    if (const auto how = end_of_dead()) throw SessionError(describe_death(error.what(), *how));
    throw;
  } catch (const SystemError& error) {
    const bool closed = ipc::peer_is_gone(error);
    if (const auto how = end_of_dead(); how && closed)
      throw SessionError(describe_death("the manager closed its socket before it was ready", *how));
    throw;
  } catch (...) {
    link_.close();
    end();
    throw;
  }
  // The manager has said why. How its process ends adds nothing.
  link_.close();
  end();
  protocol::raise(std::get<protocol::Failed>(answer));
}

OwnedManager OwnedManager::start(const Config& config, const Origin& origin,
                                 const std::function<bool()>& interrupted, const Events& events) {
  auto manager = execute(origin);
  manager.bring_up(
      config, {}, [] {}, interrupted, events);
  return manager;
}

OwnedManager OwnedManager::start_over(const Config& config, const Origin& origin,
                                      const std::vector<int>& session,
                                      const std::function<void()>& free_session) {
  auto manager = execute(origin);
  manager.bring_up(config, session, free_session, base::interrupted, {});
  return manager;
}

void OwnedManager::ask_to_stop() const noexcept {
  try {
    link_.send(protocol::Leave{});
  } catch (const Error&) {
    // The manager has ended already, or reads nothing: end() kills it.
  }
}

std::string OwnedManager::end() noexcept {
  if (std::exchange(ended_, true)) return {};
  const auto deadline = base::Deadline::in_seconds(timing::manager_stop_s);
  const bool manager_ended_itself = link_.wait_until_manager_ended(deadline);
  if (!link_.wait_until_others_ended(deadline) || !manager_ended_itself) {
    link_.kill();
    link_.kill_fork_server();
  }
  link_.wait_until_others_ended(base::Deadline::in_seconds(timing::manager_stop_s));
  const bool ended = link_.wait_until_manager_ended(base::Deadline::in_seconds(timing::manager_stop_s));
  ipc::end_group_of_killed(link_.manager());  // Its fork server does, unless that was killed with it.
  link_.forget_manager();
  if (!ended) return "it was killed but has not ended: it is blocked in the kernel";
  const auto status = status_ ? told_status(status_.get()) : reaped_status(link_.manager_pid());
  return status ? ipc::describe_exit(*status) : "how it ended is not known";
}

}  // namespace accelmgr::client
