#include "python/interpreter.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include "base/ipc/system_calls.hpp"

namespace nb = nanobind;

namespace accelmgr::python {
namespace {

[[noreturn]] void wait_for_ever() noexcept {
  for (;;) pause();
}

bool is_finalizing() noexcept {
#if defined(Py_LIMITED_API)  // A module for several versions of Python: the name had an underscore
                             // before 3.13.
  static const auto function = [] {
    void* found = dlsym(RTLD_DEFAULT, "Py_IsFinalizing");
    return reinterpret_cast<int (*)()>(found != nullptr ? found : dlsym(RTLD_DEFAULT, "_Py_IsFinalizing"));
  }();
  return function() != 0;
#elif PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

/// True if the main thread is ending the interpreter, and this is another thread.
bool ends_elsewhere() noexcept { return is_finalizing() && ipc::thread_id() != getpid(); }

template <class Take>
auto take_lock(Take&& take) noexcept {
  if (ends_elsewhere()) wait_for_ever();
  try {
    return take();
  } catch (...) {  // The interpreter began to end while this thread waited, and has called pthread_exit().
    wait_for_ever();
  }
}

bool fork_is_announced = false;     // The interpreter's lock guards it.
PyObject* noted_context = nullptr;  // The lock guards it, too.

}  // namespace

Locked::Locked() noexcept : before_(take_lock(PyGILState_Ensure)) {}

Locked::~Locked() {
  if (ends_elsewhere()) wait_for_ever();  // Python has called pthread_exit() under this lock.
  PyGILState_Release(before_);
}

Unlocked::~Unlocked() {
  take_lock([this] { PyEval_RestoreThread(thread_); });
}

void before_fork() {
  PyOS_BeforeFork();
  fork_is_announced = true;
}

void after_fork_in_parent() {
  fork_is_announced = false;
  PyOS_AfterFork_Parent();
}

void begin_forked() {
  if (!fork_is_announced) PyOS_BeforeFork();
  fork_is_announced = false;
  PyOS_AfterFork_Child();
}

void note_context() {
  nb::module_::import_("accelmgr._process.thread_locals").attr("note")();
  auto context = nb::module_::import_("contextvars").attr("copy_context")();
  Py_XDECREF(std::exchange(noted_context, context.release().ptr()));
}

nb::object host_context() {
  if (noted_context == nullptr) note_context();
  return nb::borrow(noted_context).attr("copy")();
}

}  // namespace accelmgr::python
