// Starts the processes of spawn() and of `accelmgr spawn`. The fork server (base/ipc/fork_server.hpp) forks a
// child for each task. The child reads its task from the first descriptor it was passed, and calls a function
// or executes a program.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "accelmgr/launch.hpp"
#include "base/clock.hpp"
#include "base/ipc/fork_server_client.hpp"
#include "base/unique_fd.hpp"
#include "launcher/launch/run/text_message.hpp"

namespace accelmgr::launch {

/// What a child does: it executes `program`, or makes `call`, or else makes the calls of Spawner::fork().
struct Task {
  int rank = 0;                                    ///< In the world.
  std::map<std::string, std::string> environment;  ///< The complete environment.
  std::vector<std::string> program;                ///< argv; looked up in PATH of `environment`.
  std::shared_ptr<const TextMessage> call;         ///< From make_call(); many tasks may share it.
  bool execute_self = false;                       ///< The child executes this program, which makes the call.
};

/// A call of a registered function, after a call of the registered `setup` unless that is empty. Throws
/// UsageError if the arguments take more than ipc::max_text_bytes.
std::shared_ptr<const TextMessage> make_call(const std::string& function, const std::string& setup,
                                             const Value& args);

/// What a child that runs a function sends before it ends. A child that is killed sends nothing.
struct Report {
  std::optional<Value> result;
  std::optional<Failure> failure;
};

/// The functions that a child runs, in its memory. `setup` may be empty.
struct Calls {
  std::function<void(int rank)> setup;
  std::function<Value(int rank)> function;
};

/// Client of a fork server. The fork server, its children and their descendants end when this object is
/// destroyed or this process ends, however it ends.
class Spawner {
 public:
  /// Forks the fork server from this process, even if it has other threads. A child whose task has no program
  /// and no call makes `calls`. Throws SystemError.
  static Spawner fork(const Calls& calls = {});
  /// Executes this program again as the fork server, which therefore has no memory and no descriptors of this
  /// process. Throws as from_zygote().
  static Spawner execute_server();
  /// Forks the fork server from the zygote, which is this program executed again, once for all launches of
  /// this process. Throws UsageError unless ipc::can_be_executed(), SystemError, SessionError.
  static Spawner from_zygote();
  /// Asks the fork server for a child; does not wait for it. Events carry `slot` as their `rank`. Each pair
  /// of `fds` is a descriptor here and its number in the child, which may be 0, 1 or 2. Returns a socket from
  /// which read_report() reads the child's Report; a program that could not be executed sends one too. Throws
  /// UsageError for an invalid task, SessionError if the fork server is gone, SystemError.
  base::UniqueFd start(int slot, const Task& task, std::span<const std::pair<int, int>> fds = {});
  /// See ForkServerClient::next().
  std::optional<ipc::Event> next(base::Deadline deadline) { return client_.next(deadline); }
  /// Sends a signal to the process groups of all children, and continues stopped ones. Does nothing if the
  /// fork server is gone.
  void signal(int number) noexcept;
  /// How the fork server ended, as describe_exit() says it; nullopt while it runs.
  std::optional<std::string> fork_server_end() noexcept;
  /// See ForkServerClient::descriptor().
  int descriptor() const noexcept { return client_.descriptor(); }
  /// Whether there are children whose end next() has not told.
  bool has_children() const noexcept { return client_.has_children(); }
  int pidfd() const noexcept { return client_.pidfd(); }  ///< The fork server's.
  /// Ends the fork server, all children and their descendants. Blocks for a bounded time.
  void stop(base::Deadline deadline) noexcept { client_.stop(deadline); }

 private:
  explicit Spawner(ipc::ForkServerClient client) : client_(std::move(client)) {}

  ipc::ForkServerClient client_;
};

/// The report of a child that has ended; nullopt if it sent none. Does not block. Throws SessionError if it
/// cannot be read.
std::optional<Report> read_report(int socket);

}  // namespace accelmgr::launch
