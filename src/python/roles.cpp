// Starts the processes of a manager when the program is a Python interpreter.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>

#include "manager/embedding.hpp"
#include "python/interpreter.hpp"
#include "python/replica.hpp"

namespace nb = nanobind;

namespace accelmgr::python {
namespace {

// The thread that forks holds the interpreter's lock. The child releases it, after it has told the
// interpreter that the other threads are gone.
void begin_runner() {
  begin_forked();
  const char* visible =
      "CUDA_VISIBLE_DEVICES";  // os.environ is a copy, made before this runner had a device.
  if (const char* device = std::getenv(visible)) nb::module_::import_("os").attr("environ")[visible] = device;
  PyEval_SaveThread();
}

// The caller holds the interpreter's lock.
void expect_runners(const Config& config) {
  if (config.runners.device == Device::xla) nb::module_::import_("accelmgr._xla").attr("preload")();
}

// The manager gets one compute thread, whatever its parent had: it only reads data and describes a model,
// while runners compute.
void begin_manager() {
  nb::module_::import_("torch").attr("set_num_threads")(1);
  PyEval_SaveThread();
}

void fork_in_python(const std::function<void()>& fork) {
  const Locked lock;
  before_fork();
  try {
    fork();
  } catch (...) {
    after_fork_in_parent();
    throw;
  }
  after_fork_in_parent();
}

void embed(std::vector<std::string> command) {
  register_replicas();
  register_sources();
  manager::embed({.command = std::move(command),
                  .around_fork = fork_in_python,
                  .forked = begin_forked,
                  .runners_expected = expect_runners,
                  .manager_began = begin_manager,
                  .runner_began = begin_runner});
}

}  // namespace

void bind_roles(nb::module_& module) {
  module.def("embed", &embed, nb::arg("command"),
             "Sets the command that runs this interpreter again, for the processes of managers. Call it once "
             "per process.");
  module.def(
      "take_role", [](const std::vector<std::string>& arguments) { manager::take_role(arguments); },
      nb::arg("arguments"), "Gives such a process the role in the arguments; does not return.");
}

}  // namespace accelmgr::python
