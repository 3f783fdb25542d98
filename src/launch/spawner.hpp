// The processes behind spawn() and `accelmgr spawn`: tasks, and the launcher (ipc/launcher.hpp) that forks a
// child for each. The child reads its task from its first descriptor, and calls a function or executes a
// program.
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
#include "base/unique_fd.hpp"
#include "ipc/launcher.hpp"
#include "launch/parcel.hpp"

namespace accelmgr::launch {

/// What a child does: executes `program`, or makes `call`, or calls the callable of Spawner::fork().
struct Task {
  int rank = 0;                                    ///< In the world.
  std::map<std::string, std::string> environment;  ///< All of it.
  std::vector<std::string> program;                ///< argv; looked for in PATH of `environment`.
  std::shared_ptr<const Parcel> call;              ///< make_call(); many tasks may share it.
  bool execute_self = false;                       ///< The call is made by this program executed anew.
};

/// The call of a registered function, after that of a registered `setup` if there is one. Throws UsageError
/// when the arguments take more than ipc::max_text_bytes.
std::shared_ptr<const Parcel> make_call(const std::string& function, const std::string& setup,
                                        const Value& args);

/// What a child that runs a function tells before it ends; one that dies tells nothing.
struct Report {
  std::optional<Value> result;
  std::optional<Failure> failure;
};

/// The launcher's client. It, all children, and what these have started, end when this object is destroyed or
/// this process ends in whatever way.
class Spawner {
 public:
  /// Forks this process as it stands, threads or not. `callable` is called with the rank by the children of
  /// tasks without program and call. Throws SystemError.
  static Spawner fork(std::function<Value(int)> callable = {}, std::function<void(int)> setup = {});
  /// The launcher is forked from the forkserver: this program executed anew, once for all launches of this
  /// process. Throws UsageError unless take_role() was called, SystemError, SessionError.
  static Spawner execute();
  Spawner(Spawner&&) noexcept;
  Spawner& operator=(Spawner&&) noexcept;
  ~Spawner();

  /// `slot` is how events name the child (their `rank`). `fds`: of each pair the first becomes descriptor
  /// number second (0, 1 and 2 too) in the child. Returns our end of the socket on which a Report comes
  /// (read_report()): of a program that could not be executed too. Does not wait for the child. Throws
  /// SystemError (EPIPE: the launcher is gone), UsageError.
  base::UniqueFd start(int slot, const Task& task, std::span<const std::pair<int, int>> fds = {});
  /// Started and Ended, as in ipc/launcher.hpp; nullopt when there is none before the deadline, or the
  /// launcher is gone (launcher_end()).
  std::optional<ipc::Event> next(base::Deadline deadline);
  /// To the process groups of all children; stopped ones go on. Nothing if the launcher is gone.
  void signal(int number) noexcept;
  /// How the launcher ended, if it is gone though nobody stopped it. All that it had started has been killed.
  const std::optional<std::string>& launcher_end() const noexcept;
  int socket() const noexcept;  ///< Readable when there is an event, or the launcher is gone.
  int pidfd() const noexcept;   ///< Of the launcher.
  /// Ends the launcher, all children and theirs. Bounded.
  void stop(base::Deadline deadline) noexcept;

 private:
  struct State;
  explicit Spawner(std::unique_ptr<State> state) noexcept;
  std::unique_ptr<State> state_;
};

/// Of a child that has ended: nullopt when it did without one.
std::optional<Report> read_report(int socket);

/// In main(), before anything else: when this process was executed as a child or as a launcher, becomes that
/// and does not return.
void take_role(int argc, char** argv);
/// Promises that this program, executed as ipc::self_command() says, calls take_role().
void let_be_executed() noexcept;
/// Whether one of them was called: only then this program can be executed as a child.
bool can_be_executed() noexcept;

}  // namespace accelmgr::launch
