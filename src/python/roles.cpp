// How the processes of a manager come to be where Python is the program.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "manager/embedding.hpp"
#include "python/interpreter.hpp"
#include "python/model.hpp"

namespace nb = nanobind;

namespace accelmgr::python {
namespace {

// The lock is held by the thread that forks: in the child it is to be let go of, after the interpreter has
// seen that its other threads are gone.
void begin_runner() {
  PyOS_AfterFork_Child();
  PyEval_SaveThread();
}

void begin_manager() { PyEval_SaveThread(); }

void fork_in_python(const std::function<void()>& fork) {
  const Locked lock;
  PyOS_BeforeFork();
  try {
    fork();
  } catch (...) {
    PyOS_AfterFork_Parent();
    throw;
  }
  PyOS_AfterFork_Parent();
}

void embed(std::vector<std::string> command) {
  register_kind();
  manager::embed({.command = std::move(command),
                  .around_fork = fork_in_python,
                  .forked = PyOS_AfterFork_Child,
                  .manager_began = begin_manager,
                  .runner_began = begin_runner});
}

}  // namespace

void bind_roles(nb::module_& module) {
  module.def("embed", &embed, nb::arg("command"),
             "Names the command that runs this interpreter again, for the processes of managers. Once.");
  module.def(
      "take_role", [](const std::vector<std::string>& arguments) { manager::take_role(arguments); },
      nb::arg("arguments"), "In such a process: becomes what the arguments say, and does not return.");
}

}  // namespace accelmgr::python
