#include "launcher/launch/run/spawner.hpp"

#include <fmt/format.h>

#include <cerrno>

#include "base/ipc/process.hpp"
#include "base/ipc/roles.hpp"
#include "base/ipc/socket.hpp"
#include "base/ipc/zygote.hpp"
#include "base/timing.hpp"
#include "launcher/launch/run/child.hpp"
#include "launcher/launch/run/child_messages.hpp"

namespace accelmgr::launch {
namespace {

void check_can_be_executed(const char* what) {
  if (!ipc::can_be_executed())
    throw UsageError(fmt::format(
        "this program cannot be executed as {}: accelmgr::init() must be called first in main()", what));
}

void check(const Task& task) {
  if (!task.program.empty() && (task.call || task.execute_self))
    throw UsageError("a task must either execute a program or call a function, not both");
  if (task.execute_self && !task.call)
    throw UsageError("a callable cannot be passed to a program that is executed; name a registered function");
  if (task.execute_self) check_can_be_executed("a child");
}

}  // namespace

std::shared_ptr<const TextMessage> make_call(const std::string& function, const std::string& setup,
                                             const Value& args) {
  return std::make_shared<const TextMessage>(encode(Call{setup, function, args}),
                                             fmt::format("the call of '{}' with its arguments", function));
}

Spawner Spawner::fork(const Calls& calls) {
  const ipc::ChildMain child_main = [&](ipc::SpawnRequest request) -> int {
    run_child(std::move(request), calls);
  };
  return Spawner(ipc::ForkServerClient::start_beside_threads(child_main, fork_server_options()));
}

Spawner Spawner::execute_server() {
  check_can_be_executed("a fork server");
  auto executed = ipc::execute_in_role(fork_server_argument);
  return Spawner(ipc::ForkServerClient(std::move(executed.socket), std::move(executed.process)));
}

Spawner Spawner::from_zygote() {
  check_can_be_executed("the forkserver");
  auto served = ipc::fork_from_zygote(fork_server_role);
  return Spawner(ipc::ForkServerClient(std::move(served.socket), std::move(served.process)));
}

base::UniqueFd Spawner::start(int slot, const Task& task, std::span<const std::pair<int, int>> fds) {
  check(task);
  Order order{task.rank, task.environment, {}, task.program, task.execute_self, task.call != nullptr};
  auto [ours, theirs] = ipc::socket_pair();
  std::vector<int> passed{theirs.get()};
  for (const auto& [from, to] : fds) {
    passed.push_back(from);
    order.targets.push_back(to);
  }
  // Sent before the child exists, so that it never waits for its order.
  TextMessage(encode(order), fmt::format("the environment of rank {}", task.rank)).send(ours.get());
  if (task.call) task.call->send(ours.get());
  try {
    client_.spawn(slot, 0, passed);
  } catch (const SystemError& error) {
    if (error.code() != EPIPE && error.code() != ECONNRESET) throw;
    client_.server_exit(base::Deadline::in_seconds(timing::fork_server_kill_s));
    throw SessionError(fmt::format("rank {} cannot be started: the fork server, its parent, has ended: {}",
                                   task.rank, fork_server_end().value_or("it has closed its socket")));
  }
  return std::move(ours);
}

void Spawner::signal(int number) noexcept {
  try {
    client_.signal(number);
  } catch (const Error&) {
    // The fork server is gone or hangs; next() and stop() handle that.
  }
}

std::optional<std::string> Spawner::fork_server_end() noexcept {
  const auto exit = client_.server_exit();
  return exit ? std::optional(ipc::describe_exit(*exit)) : std::nullopt;
}

std::optional<Report> read_report(int socket) {
  if (!ipc::is_readable(socket)) return std::nullopt;
  const auto text = receive_text_message(socket, base::Deadline::at_ns(0));
  if (!text) return std::nullopt;
  return decode_report(*text);
}

}  // namespace accelmgr::launch
