#include "launch/run/spawner.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>

#include "base/timing.hpp"
#include "ipc/process.hpp"
#include "ipc/socket.hpp"
#include "launch/run/child.hpp"
#include "launch/run/task.hpp"
#include "launch/run/zygote.hpp"

namespace accelmgr::launch {
namespace {

void check_can_be_executed(const char* what) {
  if (!can_be_executed())
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

struct Spawner::State {
  ipc::ForkServerClient client;
  pid_t owner = getpid();
  /// Running children by slot. This process kills them if the fork server has died.
  std::map<int, ipc::Child> running = {};
  std::optional<std::string> fork_server_end = {};
  bool stopped = false;

  void kill_running() noexcept {
    for (const auto& [slot, child] : running) ipc::send_group_signal(child.pidfd.get(), child.pid, SIGKILL);
    const auto deadline = base::Deadline::in_seconds(timing::fork_server_kill_s);
    for (const auto& [slot, child] : running) ipc::wait_ended(child.pidfd.get(), deadline);
    running.clear();
  }

  /// Kills the fork server if it has only closed its socket, records how it ended, and kills the children.
  void note_end_of_fork_server() {
    if (fork_server_end || stopped) return;
    if (!ipc::wait_ended(client.pidfd(), base::Deadline::in_seconds(timing::fork_server_kill_s)))
      ipc::send_signal(client.pidfd(), SIGKILL);
    ipc::wait_ended(client.pidfd(), base::Deadline::in_seconds(timing::fork_server_kill_s));
    const auto status = client.take_exit_status();  // nullopt if the zygote is its parent.
    fork_server_end = status ? ipc::describe_exit(*status) : "ended";
    kill_running();
  }
};

std::shared_ptr<const TextMessage> make_call(const std::string& function, const std::string& setup,
                                             const Value& args) {
  return std::make_shared<const TextMessage>(encode(Call{setup, function, args}),
                                             fmt::format("the call of '{}' with its arguments", function));
}

Spawner::Spawner(std::unique_ptr<State> state) noexcept : state_(std::move(state)) {}
Spawner::Spawner(Spawner&&) noexcept = default;

Spawner::~Spawner() { stop(base::Deadline::in_seconds(timing::fork_server_kill_s)); }

Spawner Spawner::fork(std::function<Value(int)> callable, std::function<void(int)> setup) {
  const ipc::ChildMain child_main = [&](ipc::SpawnRequest request) -> int {
    run_child(std::move(request), callable, setup);
  };
  return Spawner(std::unique_ptr<State>(
      new State{ipc::ForkServerClient::start_beside_threads(child_main, fork_server_options())}));
}

Spawner Spawner::execute_server() {
  check_can_be_executed("a fork server");
  auto [ours, theirs] = ipc::socket_pair();
  const auto creator = ipc::open_pidfd(getpid());
  const std::pair<int, int> inherited[] = {{theirs.get(), fork_server_socket},
                                           {creator.get(), fork_server_creator}};
  auto process = ipc::execute_self({fork_server_argument}, inherited);
  return Spawner(
      std::unique_ptr<State>(new State{ipc::ForkServerClient(std::move(ours), std::move(process))}));
}

Spawner Spawner::execute() {
  check_can_be_executed("the forkserver");
  return Spawner(std::unique_ptr<State>(new State{fork_server_from_zygote()}));
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
    state_->client.spawn(slot, 0, passed);
  } catch (const SystemError& error) {
    if (error.code() != EPIPE && error.code() != ECONNRESET) throw;
    state_->note_end_of_fork_server();
    throw SessionError(fmt::format("rank {} cannot be started: the fork server, its parent, was {}",
                                   task.rank, state_->fork_server_end.value_or("stopped")));
  }
  return std::move(ours);
}

std::optional<ipc::Event> Spawner::next(base::Deadline deadline) {
  auto& state = *state_;
  if (state.fork_server_end || state.stopped) return std::nullopt;
  auto event = state.client.next(deadline);
  if (!event) {
    if (ipc::is_closed(state.client.socket()) || ipc::has_ended(state.client.pidfd()))
      state.note_end_of_fork_server();
    return std::nullopt;
  }
  if (const auto* started = std::get_if<ipc::Started>(&*event))
    state.running[started->rank] = {started->pid, base::duplicate(started->pidfd.get())};
  else
    state.running.erase(std::get<ipc::Ended>(*event).rank);
  return event;
}

void Spawner::signal(int number) noexcept {
  if (state_->fork_server_end || state_->stopped) return;
  try {
    state_->client.signal(number);
  } catch (const Error&) {
    // The fork server is gone or hangs; next() and stop() handle that.
  }
}

const std::optional<std::string>& Spawner::fork_server_end() const noexcept {
  return state_->fork_server_end;
}
int Spawner::socket() const noexcept { return state_->client.socket(); }
int Spawner::pidfd() const noexcept { return state_->client.pidfd(); }

void Spawner::stop(base::Deadline deadline) noexcept {
  if (!state_ || state_->stopped) return;
  state_->stopped = true;
  if (getpid() != state_->owner) return;  // In a forked process: the fork server belongs to the parent.
  state_->client.stop(deadline);
  state_->kill_running();
}

std::optional<Report> read_report(int socket) {
  if (!ipc::is_readable(socket)) return std::nullopt;
  const auto text = receive_text_message(socket, base::Deadline::at_ns(0));
  if (!text) return std::nullopt;
  return decode_report(*text);
}

}  // namespace accelmgr::launch
