// Between C++ and the interpreter: its lock, its signals, its exceptions.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <string>
#include <type_traits>

#include "base/interruption.hpp"

namespace accelmgr::python {

// nanobind's gil_scoped_acquire and gil_scoped_release for threads that are here when the program ends: who
// asks for the lock from then on waits for ever. Python does so from 3.14 on; before, it calls
// pthread_exit(), which unwinds through destructors that ask for the lock again, and that is the end of the
// process (SIGABRT).

class Locked {
 public:
  Locked() noexcept;
  ~Locked();
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  PyGILState_STATE before_;
};

class Unlocked {
 public:
  Unlocked() noexcept : thread_(PyEval_SaveThread()) {}
  ~Unlocked();
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* thread_;
};

/// What the package's Python says of an exception: its type and message, and where it was raised. Needs the
/// interpreter's lock.
std::string describe(const nanobind::python_error& error);

/// Runs `body` with the interpreter's lock. What Python throws there becomes an `Exception` with what
/// describe() says.
template <class Exception, class Body>
auto in_python(Body&& body) {
  const Locked lock;
  try {
    return body();
  } catch (const nanobind::python_error& error) {
    throw Exception(describe(error));
  }
}

/// Whether a signal handler of Python has raised; asked from waits that have let go of the lock.
class Interruption {
 public:
  std::function<bool()> hook() {
    return [this] { return raised_ = raised_ || check(); };
  }
  /// Throws what the handler raised. With the lock.
  void rethrow() const {
    if (raised_) throw nanobind::python_error();
  }

 private:
  static bool check() {
    const Locked lock;
    return PyErr_CheckSignals() != 0;
  }
  bool raised_ = false;
};

/// `call` without the interpreter's lock, its waits ended by what a signal handler raises: that is thrown
/// then.
template <class Call>
auto waiting(Call&& call) {
  Interruption interruption;
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
    interruption.rethrow();
    throw;
  }
}

/// `function`, to be called as waiting() does.
template <class Result, class... Arguments>
auto interruptible(Result (*function)(Arguments...)) {
  return [function](Arguments... arguments) { return waiting([&] { return function(arguments...); }); };
}

void bind_errors(nanobind::module_& module);
void bind_roles(nanobind::module_& module);
void bind_manager(nanobind::module_& module);
void bind_results(nanobind::module_& module);
void bind_launch(nanobind::module_& module);
void bind_distributed(nanobind::module_& module);

}  // namespace accelmgr::python
