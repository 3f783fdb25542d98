#include "launch/spawner.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>

#include "ipc/process.hpp"
#include "ipc/socket.hpp"
#include "launch/child.hpp"
#include "launch/forkserver.hpp"
#include "launch/task.hpp"

namespace accelmgr::launch {
namespace {

constexpr double kill_bound_s = 2;

void check(const Task& task) {
  if (!task.program.empty() && (task.call || task.execute_self))
    throw UsageError("a task executes a program or calls a function, not both");
  if (task.execute_self && !task.call)
    throw UsageError("a callable cannot be called by a program executed anew");
  if (task.execute_self && !can_be_executed())
    throw UsageError(
        "this program cannot be executed as a child: accelmgr::init() must be called first in main()");
}

}  // namespace

struct Spawner::State {
  ipc::LauncherClient client;
  pid_t owner = getpid();
  /// Those that run, by slot: to be killed when the launcher dies and can do it no more.
  std::map<int, ipc::Child> running = {};
  std::optional<std::string> launcher_end = {};
  bool stopped = false;

  void kill_running() noexcept {
    for (const auto& [slot, child] : running) ipc::send_group_signal(child.pidfd.get(), child.pid, SIGKILL);
    const auto deadline = base::Deadline::in_seconds(kill_bound_s);
    for (const auto& [slot, child] : running) ipc::wait_ended(child.pidfd.get(), deadline);
    running.clear();
  }

  /// It cannot be of use any more, whether it is dead or has only closed its socket.
  void note_end_of_launcher() {
    if (launcher_end || stopped) return;
    if (!ipc::wait_ended(client.pidfd(), base::Deadline::in_seconds(kill_bound_s)))
      ipc::send_signal(client.pidfd(), SIGKILL);
    ipc::wait_ended(client.pidfd(), base::Deadline::in_seconds(kill_bound_s));
    const auto status = client.take_exit_status();  // Of one from the forkserver nobody knows.
    launcher_end = status ? ipc::describe_exit(*status) : "ended";
    kill_running();
  }
};

std::shared_ptr<const Parcel> make_call(const std::string& function, const std::string& setup,
                                        const Value& args) {
  return std::make_shared<const Parcel>(encode(Call{setup, function, args}),
                                        fmt::format("the call of '{}' with its arguments", function));
}

Spawner::Spawner(std::unique_ptr<State> state) noexcept : state_(std::move(state)) {}
Spawner::Spawner(Spawner&&) noexcept = default;

Spawner& Spawner::operator=(Spawner&& other) noexcept {
  if (this != &other) {
    stop(base::Deadline::in_seconds(kill_bound_s));
    state_ = std::move(other.state_);
  }
  return *this;
}

Spawner::~Spawner() { stop(base::Deadline::in_seconds(kill_bound_s)); }

Spawner Spawner::fork(std::function<Value(int)> callable, std::function<void(int)> setup) {
  const ipc::ChildMain child_main = [&](ipc::SpawnRequest request) -> int {
    run_child(std::move(request), callable, setup);
  };
  return Spawner(std::unique_ptr<State>(new State{ipc::LauncherClient::start_beside_threads(
      child_main, {.adopt_orphans = true, .child_name = "accelmgr:rank", .core_dumps = true})}));
}

Spawner Spawner::execute() {
  if (!can_be_executed())
    throw UsageError(
        "this program cannot be executed as the forkserver: accelmgr::init() must be called first in main()");
  return Spawner(std::unique_ptr<State>(new State{launcher_from_forkserver()}));
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
  // All of it is there before the child is.
  Parcel(encode(order), fmt::format("the environment of rank {}", task.rank)).send(ours.get());
  if (task.call) task.call->send(ours.get());
  try {
    state_->client.spawn(slot, 0, passed);
  } catch (const SystemError& error) {
    if (error.code() != EPIPE && error.code() != ECONNRESET) throw;
    state_->note_end_of_launcher();
    throw SessionError(
        fmt::format("rank {} cannot be started: the launcher, which would be its parent, was {}", task.rank,
                    state_->launcher_end.value_or("stopped")));
  }
  return std::move(ours);
}

std::optional<ipc::Event> Spawner::next(base::Deadline deadline) {
  auto& state = *state_;
  if (state.launcher_end || state.stopped) return std::nullopt;
  auto event = state.client.next(deadline);
  if (!event) {
    if (ipc::is_closed(state.client.socket()) || ipc::has_ended(state.client.pidfd()))
      state.note_end_of_launcher();
    return std::nullopt;
  }
  if (const auto* started = std::get_if<ipc::Started>(&*event))
    state.running[started->rank] = {started->pid, base::duplicate(started->pidfd.get())};
  else
    state.running.erase(std::get<ipc::Ended>(*event).rank);
  return event;
}

void Spawner::signal(int number) noexcept {
  if (state_->launcher_end || state_->stopped) return;
  try {
    state_->client.signal(number);
  } catch (const Error&) {
    // It is gone, or hangs: next() and stop() deal with that.
  }
}

const std::optional<std::string>& Spawner::launcher_end() const noexcept { return state_->launcher_end; }
int Spawner::socket() const noexcept { return state_->client.socket(); }
int Spawner::pidfd() const noexcept { return state_->client.pidfd(); }

void Spawner::stop(base::Deadline deadline) noexcept {
  if (!state_ || state_->stopped) return;
  state_->stopped = true;
  if (getpid() != state_->owner) return;  // A copy in a forked process; the descriptors are closed with it.
  state_->client.stop(deadline);
  state_->kill_running();
}

std::optional<Report> read_report(int socket) {
  if (!ipc::is_readable(socket)) return std::nullopt;
  const auto text = receive_parcel(socket, base::Deadline::at_ns(0));
  if (!text) return std::nullopt;
  return decode_report(*text);
}

}  // namespace accelmgr::launch
