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

namespace accelmgr::launch {

/// What a child does. Exactly one of `function`, `callable` and `program` is there.
struct Task {
  int rank = 0;                                    ///< In the world.
  std::map<std::string, std::string> environment;  ///< All of it.
  std::string setup;                               ///< A registered function; may be empty.
  std::string function;                            ///< A registered function.
  std::vector<std::string> program;                ///< argv; looked for in PATH of `environment`.
  Value args = Value::array();
  bool execute_self = false;  ///< The function is called by this program executed anew.
};

/// What a child that runs a function tells before it ends; one that dies tells nothing.
struct Report {
  std::optional<Value> result;
  std::optional<Failure> failure;
};

/// The launcher's client. It, all children, and what these have started, end when this object is destroyed or
/// this process ends in whatever way.
class Spawner {
 public:
  /// Forks this process as it stands; its children can run `callable` (tasks without function and program).
  static Spawner fork(Function callable = {}, std::function<void()> setup = {});
  /// Executes this program as the launcher: the forkserver.
  static Spawner execute();
  Spawner(Spawner&&) noexcept;
  Spawner& operator=(Spawner&&) noexcept;
  ~Spawner();

  /// `slot` is how events name the child. `fds`: of each pair the first becomes descriptor number second (0,
  /// 1 and 2 too) in the child. Returns our end of the socket on which a Report comes (read_report()).
  base::UniqueFd start(int slot, const Task& task, std::span<const std::pair<int, int>> fds = {});
  /// Started and Ended, as in ipc/launcher.hpp; nullopt when there is none before the deadline, or the
  /// launcher is gone.
  std::optional<ipc::Event> next(base::Deadline deadline);
  int socket() const noexcept;  ///< Readable when there is an event, or the launcher is gone.
  int pidfd() const noexcept;   ///< Of the launcher.
  /// Ends the launcher, all children and theirs. Bounded.
  void stop(base::Deadline deadline) noexcept;

 private:
  struct State;
  explicit Spawner(std::unique_ptr<State> state) noexcept;
  std::unique_ptr<State> state_;
};

/// nullopt when the child ended without one.
std::optional<Report> read_report(int socket);

/// In main(), before anything else: when this process was executed as a child or as a launcher, becomes that
/// and does not return.
void take_role(int argc, char** argv);

}  // namespace accelmgr::launch
