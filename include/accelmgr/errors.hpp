// The exceptions of accelmgr. One type per cause; `what()` says what was wrong, where, and what would be
// right. Events that a training loop must expect (data ended, runner lost, timeout) are not exceptions: see
// StepResult.
#pragma once

#include <stdexcept>
#include <string>

namespace accelmgr {

/// Base of all exceptions thrown by accelmgr.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The caller broke a rule of the interface: `start` without `init`, two threads in one handle, a closed
/// handle.
class UsageError : public Error {
 public:
  using Error::Error;
};

/// A configuration that cannot be used. `key` is the dotted path (`optimizer.kind`), empty when no single key
/// is at fault.
class ConfigError : public Error {
 public:
  explicit ConfigError(const std::string& what, std::string key = {}) : Error(what), key_(std::move(key)) {}
  const std::string& key() const noexcept { return key_; }

 private:
  std::string key_;
};

/// A model that cannot be built, bound to the master parameters, or whose output is not what a model must
/// return.
class ModelError : public Error {
 public:
  using Error::Error;
};

/// Data that cannot be read, or an element of another dtype or shape than its source declared.
class DataError : public Error {
 public:
  using Error::Error;
};

/// The session cannot be made or used: too little memory, a layout of another build, the manager is gone.
class SessionError : public Error {
 public:
  using Error::Error;
};

/// A checkpoint that cannot be read or written; `what()` names the file, and what is wrong with it.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

/// A runner failed. `rank` is -1 when no single runner is at fault.
class RunnerError : public Error {
 public:
  RunnerError(const std::string& what, int rank, std::string phase)
      : Error(what), rank_(rank), phase_(std::move(phase)) {}
  int rank() const noexcept { return rank_; }
  const std::string& phase() const noexcept { return phase_; }

 private:
  int rank_;
  std::string phase_;
};

/// A system call failed; `what()` names the call, its object and the text of `code()` (an errno value).
class SystemError : public Error {
 public:
  SystemError(const std::string& what, int code);
  int code() const noexcept { return code_; }

 private:
  int code_;
};

}  // namespace accelmgr
