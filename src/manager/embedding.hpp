// For an interpreter that loads accelmgr as an extension: what init() is to a program of its own.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

namespace accelmgr::manager {

struct Embedding {
  /// What runs the interpreter again so that it calls take_role() with the arguments that follow these.
  std::vector<std::string> command;
  /// Calls its argument, which forks, as the interpreter wants it called.
  std::function<void(const std::function<void()>&)> around_fork = [](const auto& fork) { fork(); };
  /// In the child.
  std::function<void()> forked = [] {};
  /// In the manager process, when it has forked its launcher: other threads will call into the interpreter.
  std::function<void()> manager_began = [] {};
  /// In each runner, forked from a thread that was inside the interpreter.
  std::function<void()> runner_began = [] {};
};

/// Once in each process, before anything else of accelmgr. The host may have threads. Throws UsageError when
/// called twice.
void embed(Embedding embedding);

/// In the executed process, after embed(): becomes what `arguments` say, and does not return then. The
/// process has one thread.
void take_role(std::span<const std::string> arguments);

const Embedding& embedding() noexcept;

}  // namespace accelmgr::manager
