// How C++ uses the interpreter: its lock, its signals, its exceptions, and forks.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <string>
#include <type_traits>
#include <utility>

#include "base/interruption.hpp"
#include "base/unmovable.hpp"

namespace accelmgr::python {

// As nanobind's gil_scoped_acquire and gil_scoped_release, but safe for threads that still run when the
// program ends: a thread that asks for the lock from then on waits for ever. Python does so itself from 3.14
// on. Older versions call pthread_exit() in that thread. It unwinds through destructors that ask for the lock
// again, and the process ends with SIGABRT.

class Locked : base::Unmovable {
 public:
  Locked() noexcept;
  ~Locked();

 private:
  PyGILState_STATE before_;
};

class Unlocked : base::Unmovable {
 public:
  Unlocked() noexcept : thread_(PyEval_SaveThread()) {}
  ~Unlocked();

 private:
  PyThreadState* thread_;
};

// The parent calls before_fork() and after_fork_in_parent() around a fork. The child calls begin_forked(),
// which tells the interpreter about the fork. The fork server forks without before_fork(), as it does not
// call Python; begin_forked() then calls PyOS_BeforeFork() itself. From 3.13 on PyOS_AfterFork_Child()
// releases the import lock, which PyOS_BeforeFork() must have taken, exactly once.
// Requires: the caller of any of the three holds the interpreter's lock.
void before_fork();
void after_fork_in_parent();
void begin_forked();

/// Notes the context variables of the calling thread, in which forks of this process are to run, and what it
/// has in objects of threading.local.
void note_context();
/// A copy of the noted variables: a context can be entered only once at a time, and two threads may fork. In
/// a process that no host has forked, a copy of the calling thread's variables.
nanobind::object host_context();

/// Type, message and traceback of an exception, as accelmgr._serialization.describe formats them.
/// Requires: the caller holds the interpreter's lock.
std::string describe(const nanobind::python_error& error);

/// Throws a C++ ConfigError or device::DeviceError if `error` is that of accelmgr.errors; returns for other
/// errors.
void rethrow_typed(const nanobind::python_error& error);

/// Runs `body` with the interpreter's lock. Throws an exception of Python as an `Exception` with the text of
/// describe(); rethrow_typed() says which ones do not become one.
template <class Exception, class Body>
auto in_python(Body&& body) {
  const Locked lock;
  try {
    return body();
  } catch (const nanobind::python_error& error) {
    rethrow_typed(error);
    throw Exception(describe(error));
  }
}

/// Finds out whether a signal handler of Python has raised. Waits that run without the lock call its hook().
class Interruption {
 public:
  Interruption() = default;
  /// `work`: a callable that is called at each look, or null.
  explicit Interruption(PyObject* work) noexcept : work_(work) {}

  std::function<bool()> hook() {
    return [this] { return raised_ = raised_ || check(); };
  }
  /// Throws what the handler raised, if it has, once.
  /// Requires: the caller holds the lock.
  void rethrow() {
    if (std::exchange(raised_, false)) throw nanobind::python_error();
  }

 private:
  bool check() const {
    const Locked lock;
    if (PyErr_CheckSignals() != 0) return true;
    if (work_ == nullptr) return false;
    auto* result = PyObject_CallObject(work_, nullptr);
    Py_XDECREF(result);
    return result == nullptr;
  }
  PyObject* work_ = nullptr;
  bool raised_ = false;
};

/// Runs `call` without the interpreter's lock. If a signal handler of Python raises, the waits of `call` end,
/// and waiting() throws what the handler raised. `work`: see Interruption.
template <class Call>
auto waiting(Call&& call, PyObject* work = nullptr) {
  Interruption interruption(work);
  const auto hook = interruption.hook();
  const auto run = [&] {
    const Unlocked unlocked;
    const base::InterruptionScope scope(hook);
    return call();
  };
  try {
    if constexpr (std::is_void_v<decltype(call())>) {
      run();
      interruption.rethrow();
    } else {
      auto result = run();
      interruption.rethrow();
      return result;
    }
  } catch (...) {
    hook();  // The error may come from an interruption: see rethrow() in torch_store.cpp.
    interruption.rethrow();
    throw;
  }
}

/// A callable that calls `function` through waiting().
template <class Result, class... Arguments>
auto interruptible(Result (*function)(Arguments...)) {
  return [function](Arguments... arguments) { return waiting([&] { return function(arguments...); }); };
}

/// Tells the interpreter that this process is a fork, unless it knows. C++ forks without telling it.
void see_fork();

/// Makes the floor `distributed` use the torch of Python.
void register_torch();

void bind_errors(nanobind::module_& module);
void bind_roles(nanobind::module_& module);
void bind_memory(nanobind::module_& module);
void bind_replica(nanobind::module_& module);
void bind_device(nanobind::module_& module);
void bind_manager(nanobind::module_& module);
void bind_observer(nanobind::module_& module);
void bind_records(nanobind::module_& module);
void bind_results(nanobind::module_& module);
void bind_snapshot(nanobind::module_& module);
void bind_launch(nanobind::module_& module);
void bind_distributed(nanobind::module_& module);

}  // namespace accelmgr::python
