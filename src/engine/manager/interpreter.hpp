// Initialization for an interpreter that loads accelmgr as an extension, in the place of accelmgr::init().
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "base/ipc/main_heap.hpp"

namespace accelmgr::manager {

struct Interpreter {
  /// The command that executes the interpreter again. accelmgr appends arguments, and the new interpreter
  /// must pass them to take_role().
  std::vector<std::string> command;
  /// Calls its argument, which forks, in the way that the interpreter requires.
  std::function<void(const std::function<void()>&)> around_fork = [](const auto& fork) { fork(); };
  /// Called in a manager process that was forked, before anything else and before other threads begin there.
  /// Calls its argument, which does not return, on a thread of the main heap: runners are forks of that
  /// thread.
  std::function<void(const std::function<void()>&)> forked = ipc::on_main_heap;
  /// Called in the process that will fork the runners of `config`, before it does: loads what all of them
  /// need. It must start no thread.
  std::function<void(const Config&)> runners_expected = [](const Config&) {};
  /// Called in a fork server that the manager has forked, before it forks anything, and in the manager when
  /// it has described model and data: frees copies of the host's values, which the host moves into the
  /// session.
  std::function<void()> forget_values = [] {};
  /// Called in the manager process once it has forked its fork server, before other threads use the
  /// interpreter.
  std::function<void()> manager_began = [] {};
  /// Called in each runner, when its environment shows its device. The thread that forked it was inside the
  /// interpreter.
  std::function<void()> runner_began = [] {};
};

/// Call once in each process, before anything else of accelmgr. The process may have other threads. Throws
/// UsageError when accelmgr is initialized already, ConfigError as base::start_logging().
void embed(Interpreter interpreter);

/// Call in the executed process, after embed(), while it has one thread. If `arguments` name a role, the
/// process takes it, and the call does not return.
void take_role(std::span<const std::string> arguments);

const Interpreter& interpreter() noexcept;

/// Registers `call`, to be called in a manager process once it has forked its fork server and before any code
/// of the user. Call before init().
void at_begin(std::function<void()> call);
void call_at_begin();

}  // namespace accelmgr::manager
