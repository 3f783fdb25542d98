#include "python/interpreter.hpp"

#include <unistd.h>

namespace accelmgr::python {
namespace {

[[noreturn]] void wait_for_ever() noexcept {
  for (;;) pause();
}

/// Whether the main thread takes the interpreter down.
bool ends_elsewhere() noexcept {
#if PY_VERSION_HEX >= 0x030d0000
  const bool ends = Py_IsFinalizing() != 0;
#else
  const bool ends = _Py_IsFinalizing() != 0;
#endif
  return ends && gettid() != getpid();
}

template <class Take>
auto take_lock(Take&& take) noexcept {
  if (ends_elsewhere()) wait_for_ever();
  try {
    return take();
  } catch (...) {  // It began to end while this thread waited: what is caught is its pthread_exit().
    wait_for_ever();
  }
}

}  // namespace

Locked::Locked() noexcept : before_(take_lock(PyGILState_Ensure)) {}

Locked::~Locked() {
  if (ends_elsewhere()) wait_for_ever();  // Python has called pthread_exit() inside.
  PyGILState_Release(before_);
}

Unlocked::~Unlocked() {
  take_lock([this] { PyEval_RestoreThread(thread_); });
}

}  // namespace accelmgr::python
