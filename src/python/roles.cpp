// Starts the processes of a manager, or a service, when the program is a Python interpreter.
#include <fmt/core.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdio>
#include <cstdlib>
#include <optional>

#include "base/config/loader.hpp"
#include "base/ipc/main_heap.hpp"
#include "engine/manager/interpreter.hpp"
#include "engine/service/service.hpp"
#include "python/interpreter.hpp"
#include "python/replica.hpp"

namespace nb = nanobind;

namespace accelmgr::python {
namespace {

/// For a manager or a runner; ranks of a launch belong to the user.
void begin_forked_python() { nb::module_::import_("accelmgr._process.child").attr("begin_forked")(); }

// The thread that forks holds the interpreter's lock. The child releases it, after it has told the
// interpreter that the other threads are gone.
void begin_runner() {
  begin_forked();
  begin_forked_python();
  const char* visible =
      "CUDA_VISIBLE_DEVICES";  // os.environ is a copy, made before this runner had a device.
  if (const char* device = std::getenv(visible)) nb::module_::import_("os").attr("environ")[visible] = device;
  PyEval_SaveThread();
}

// Requires: the caller holds the interpreter's lock.
void expect_runners(const Config& config) {
  if (config.runners.device == Device::xla) nb::module_::import_("accelmgr._runner.xla").attr("preload")();
}

void forget_values() {
  const Locked lock;
  nb::module_::import_("accelmgr._process.child").attr("forget_values")();
}

// The manager gets one compute thread, whatever its parent had: it only reads data and describes a model,
// while runners compute.
void begin_manager() {
  nb::module_::import_("torch").attr("set_num_threads")(1);
  PyEval_SaveThread();
}

// Runs on a new thread; each thread of the interpreter has its own context variables.
void fork_in_python(const std::function<void()>& fork) {
  const Locked lock;
  nb::module_::import_("accelmgr._runner.factories");  // Once, and not in each process.
  nb::module_::import_("accelmgr._process.child").attr("print_pending")();
  const auto fork_here = [&fork] {
    before_fork();
    try {
      fork();
    } catch (...) {
      after_fork_in_parent();
      throw;
    }
    after_fork_in_parent();
  };
  host_context().attr("run")(nb::cpp_function(fork_here));
}

// The new thread is one of the interpreter's, too.
void begin_forked_manager(const std::function<void()>& run) {
  begin_forked();
  const Unlocked unlocked;
  ipc::on_main_heap([&run] {
    const Locked lock;
    host_context().attr("run")(nb::cpp_function([&run] {
      begin_forked_python();
      run();
    }));
  });
}

void embed(std::vector<std::string> command) {
  register_replicas();
  register_sources();
  manager::embed({.command = std::move(command),
                  .around_fork = fork_in_python,
                  .forked = begin_forked_manager,
                  .runners_expected = expect_runners,
                  .forget_values = forget_values,
                  .manager_began = begin_manager,
                  .runner_began = begin_runner});
}

/// Keeps the interpreter's lock until begin_manager().
void serve(const std::string& configuration, const std::string& socket, std::optional<gid_t> group,
           const std::string& http, const std::string& token_file, double stop_timeout_s,
           const std::string& file, const std::vector<std::string>& assignments) {
  std::vector<config::Setting> settings;
  settings.reserve(assignments.size());
  for (const auto& assignment : assignments) settings.push_back({assignment});
  service::serve(config::from_yaml(configuration),
                 {.socket = socket,
                  .group = group,
                  .http = http,
                  .token_file = token_file,
                  .stop_timeout_s = stop_timeout_s,
                  .file = file,
                  .settings = settings},
                 [](const std::string& line) {
                   fmt::print("{}\n", line);
                   std::fflush(stdout);
                 });
}

}  // namespace

void bind_roles(nb::module_& module) {
  module.def(
      "thread_dict",
      []() -> nb::typed<nb::dict, nb::any, nb::any> { return nb::borrow<nb::dict>(PyThreadState_GetDict()); },
      "What Python code keeps in the calling thread. Up to 3.12, that is where the attributes of "
      "threading.local are.");
  module.def("embed", &embed, nb::arg("command"),
             "Sets the command that runs this interpreter again, for the processes of managers. Call it once "
             "per process.");
  module.def(
      "take_role", [](const std::vector<std::string>& arguments) { manager::take_role(arguments); },
      nb::arg("arguments"), "Gives such a process the role in the arguments; does not return.");
  module.def(
      "serve", &serve, nb::arg("configuration"), nb::arg("socket"), nb::arg("group").none(), nb::arg("http"),
      nb::arg("token_file"), nb::arg("stop_timeout_s"), nb::arg("file"), nb::arg("settings"),
      "Serves a session in this process, whose only thread calls it. SIGHUP lets it read `file` and the "
      "environment again, with `settings` (key=value) on top. Raises ConfigError before it has started "
      "anything; otherwise the process ends with the service.");
}

}  // namespace accelmgr::python
