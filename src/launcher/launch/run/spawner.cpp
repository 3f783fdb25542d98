#include "launcher/launch/run/spawner.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>

#include "base/ipc/process.hpp"
#include "base/ipc/roles.hpp"
#include "base/ipc/socket.hpp"
#include "base/ipc/zygote.hpp"
#include "base/timing.hpp"
#include "launcher/launch/run/child.hpp"
#include "launcher/launch/run/task.hpp"

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

void Spawner::kill_running() noexcept {
  for (const auto& [slot, child] : running_) ipc::send_group_signal(child.pidfd.get(), child.pid, SIGKILL);
  const auto deadline = base::Deadline::in_seconds(timing::fork_server_kill_s);
  for (const auto& [slot, child] : running_) ipc::wait_ended(child.pidfd.get(), deadline);
  running_.clear();
}

void Spawner::note_end_of_fork_server() {
  if (fork_server_end_ || stopped_) return;
  if (!ipc::wait_ended(client_.pidfd(), base::Deadline::in_seconds(timing::fork_server_kill_s)))
    ipc::send_signal(client_.pidfd(), SIGKILL);
  ipc::wait_ended(client_.pidfd(), base::Deadline::in_seconds(timing::fork_server_kill_s));
  const auto status = client_.take_exit_status();  // nullopt if the zygote is its parent.
  fork_server_end_ = status ? ipc::describe_exit(*status) : "ended";
  kill_running();
}

std::shared_ptr<const TextMessage> make_call(const std::string& function, const std::string& setup,
                                             const Value& args) {
  return std::make_shared<const TextMessage>(encode(Call{setup, function, args}),
                                             fmt::format("the call of '{}' with its arguments", function));
}

Spawner::~Spawner() { stop(base::Deadline::in_seconds(timing::fork_server_kill_s)); }

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

Spawner Spawner::execute() {
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
    note_end_of_fork_server();
    throw SessionError(fmt::format("rank {} cannot be started: the fork server, its parent, was {}",
                                   task.rank, fork_server_end_.value_or("stopped")));
  }
  return std::move(ours);
}

std::optional<ipc::Event> Spawner::next(base::Deadline deadline) {
  if (fork_server_end_ || stopped_) return std::nullopt;
  auto event = client_.next(deadline);
  if (!event) {
    if (ipc::is_closed(client_.socket()) || ipc::has_ended(client_.pidfd())) note_end_of_fork_server();
    return std::nullopt;
  }
  if (const auto* started = std::get_if<ipc::Started>(&*event))
    running_[started->rank] = {started->pid, base::duplicate(started->pidfd.get())};
  else
    running_.erase(std::get<ipc::Ended>(*event).rank);
  return event;
}

void Spawner::signal(int number) noexcept {
  if (fork_server_end_ || stopped_) return;
  try {
    client_.signal(number);
  } catch (const Error&) {
    // The fork server is gone or hangs; next() and stop() handle that.
  }
}

void Spawner::stop(base::Deadline deadline) noexcept {
  if (stopped_) return;
  stopped_ = true;
  if (getpid() != owner_) return;  // In a forked process: the fork server belongs to the parent.
  client_.stop(deadline);
  kill_running();
}

std::optional<Report> read_report(int socket) {
  if (!ipc::is_readable(socket)) return std::nullopt;
  const auto text = receive_text_message(socket, base::Deadline::at_ns(0));
  if (!text) return std::nullopt;
  return decode_report(*text);
}

}  // namespace accelmgr::launch
