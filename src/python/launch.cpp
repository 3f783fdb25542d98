// Launched processes that run functions of Python.
//
// C++ launches one registered function, which calls accelmgr/_launch/rank.py with the target: the user's
// function and its arguments. A process that was executed, or forked from the zygote, gets the target
// pickled. A process that was forked from the launching one has the object itself; so has the launching
// process in a call in place.
#include "accelmgr/launch.hpp"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

#include "accelmgr/distributed_context.hpp"
#include "accelmgr/multiprocess_launch.hpp"
#include "base/clock.hpp"
#include "base/ipc/zygote.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"
#include "base/unmovable.hpp"
#include "launcher/distributed/multiprocess/process_group.hpp"
#include "launcher/launch/plan/environment_scope.hpp"
#include "launcher/launch/run/child.hpp"
#include "launcher/launch/run/failure.hpp"
#include "python/interpreter.hpp"

namespace nb = nanobind;

namespace accelmgr::python {
namespace {

using launch::Value;

constexpr const char* function_entry = "accelmgr.python";
constexpr const char* setup_entry = "accelmgr.python.setup";

/// The process in which the interpreter believes to run. A fork by C++ must tell it (see_fork()).
std::atomic<pid_t> interpreter_pid{0};

/// The target that this thread launches. Forked processes have a copy of the thread, and so of this.
struct Current {
  PyObject* target = nullptr;
  pid_t owner = 0;
};
thread_local Current current;

class CurrentScope : base::Unmovable {
 public:
  explicit CurrentScope(nb::handle target)
      : before_(std::exchange(current, Current{target.ptr(), getpid()})) {}
  ~CurrentScope() { current = before_; }

 private:
  Current before_;
};

nb::bytes bytes_of(const Value& value) {
  const auto& binary = value.get_binary();
  return nb::bytes(binary.data(), binary.size());
}

Value value_of(const nb::bytes& bytes) {
  const auto* data = static_cast<const std::uint8_t*>(bytes.data());
  return Value::binary({data, data + bytes.size()});
}

launch::ForeignException foreign(const nb::object& module, const nb::python_error& error) {
  const auto said = module.attr("describe")(error.value());
  return {nb::cast<std::string>(said[0]), nb::cast<std::string>(said[1]), nb::cast<std::string>(said[2])};
}

/// `what`: the name of the function of accelmgr._launch.rank to call with the target.
Value call(const char* what, int rank, const Value& args) {
  const bool in_place = current.target != nullptr && current.owner == getpid();
  if (!in_place) see_fork();
  const Locked lock;
  const nb::object module = nb::module_::import_("accelmgr._launch.rank");
  try {
    const nb::object target =
        current.target != nullptr ? nb::borrow(current.target) : module.attr("load")(bytes_of(args.at(0)));
    const nb::object result = module.attr(what)(target, rank, in_place);
    return result.is_none() ? Value(nullptr) : value_of(nb::cast<nb::bytes>(result));
  } catch (const nb::python_error& error) {
    if (in_place) throw;
    throw foreign(module, error);
  }
}

/// Ends a launched process as the interpreter would.
void end_interpreter(int rank, int code) noexcept {
  try {
    see_fork();
    const Locked lock;
    nb::module_::import_("accelmgr._launch.rank").attr("end")(rank, code);
  } catch (const std::exception& error) {
    base::log().error("ending the interpreter: {}", error.what());
  }
}

/// The arguments of the function. launch_subprocesses() passes them to the setup within an object.
const Value& own_args(const Value& args) { return args.is_object() ? args.at("args") : args; }

// The processes of one launch.
class Running : base::Unmovable {
 public:
  explicit Running(launch::SpawnContext context) : context_(std::move(context)) {}

  bool join(std::optional<double> timeout_s) {
    return until(timeout_s, [this](double slice_s) { return context_.join(slice_s); });
  }
  bool wait(int local_rank, std::optional<double> timeout_s) {
    return until(timeout_s, [&](double slice_s) { return context_.wait(local_rank, slice_s); });
  }
  std::vector<launch::ProcessState> processes() {
    const Unlocked unlocked;
    const std::lock_guard turn(mutex_);
    return context_.processes();
  }
  /// Without keep() an interruption came before the caller got this object, so no caller can join it.
  ~Running() {
    if (!kept_) context_.terminate();
  }

  void keep() noexcept { kept_ = true; }
  void terminate() {
    const Unlocked unlocked;
    const std::lock_guard turn(mutex_);
    context_.terminate();
  }
  std::vector<pid_t> pids() const { return context_.pids(); }
  nb::list results() const {
    nb::list results;
    for (const auto& value : context_.results())
      results.append(value.is_null() ? nb::object(nb::none()) : nb::object(bytes_of(value)));
    return results;
  }

 private:
  /// Calls `wait` until it is true or the timeout passes. Looks for signals of Python in between.
  template <class Wait>
  bool until(std::optional<double> timeout_s, Wait wait) {
    const auto end = timeout_s ? base::Deadline::in_seconds(std::clamp(*timeout_s, 0.0, 1e9))
                               : base::Deadline::at_ns(INT64_MAX);
    for (;;) {
      const double left = static_cast<double>(end.remaining_ns()) / 1e9;
      if (wait_once(wait, std::clamp(left, 0.0, timing::signal_look_s))) return true;
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      if (left <= timing::signal_look_s) return false;
    }
  }
  template <class Wait>
  bool wait_once(Wait& wait, double slice_s) {
    const Unlocked unlocked;
    const std::lock_guard turn(mutex_);
    return wait(slice_s);
  }

  std::mutex mutex_;
  bool kept_ = false;
  launch::SpawnContext context_;
};

/// Runs `start` without the interpreter's lock, but with it for the method fork: if another thread held the
/// lock during the fork, the child could never take it.
template <class Start>
auto starting(nb::handle target, launch::StartMethod method, Start start) {
  const CurrentScope scope(target);
  std::optional<Unlocked> unlocked;
  if (method != launch::StartMethod::fork) unlocked.emplace();
  return start();
}

std::unique_ptr<Running> spawn(const nb::object& target, const nb::bytes& payload,
                               const std::map<std::string, std::string>& texts, bool has_setup) {
  auto options = launch::options_from(texts);
  if (has_setup) options.setup_name = setup_entry;
  const Value args = Value::array({value_of(payload)});
  return starting(target, options.start_method,
                  [&] { return std::make_unique<Running>(launch::spawn(function_entry, args, options)); });
}

std::unique_ptr<Running> spawn_distributed(const nb::object& target, const nb::bytes& payload,
                                           const std::string& backend, int nproc_per_node, int nnodes,
                                           int node_rank, const std::string& master_addr, int master_port,
                                           const std::string& init_method, double timeout_s,
                                           const std::string& start_method, bool daemon) {
  distributed::SpawnOptions options{
      .nproc_per_node = nproc_per_node,
      .nnodes = nnodes,
      .node_rank = node_rank,
      .master_addr = master_addr,
      .master_port = master_port,
      .init_method = init_method,
      .timeout_s = timeout_s,
      .start_method = launch::options_from({{"start_method", start_method}}).start_method,
      .join = false,  // Running::join() sees Ctrl-C.
      .daemon = daemon};
  const Value args = Value::array({value_of(payload)});
  return starting(target, options.start_method, [&] {
    return std::make_unique<Running>(distributed::spawn(backend, function_entry, args, nullptr, options));
  });
}

std::unique_ptr<Running> start_multiprocess(const nb::object& target, const nb::bytes& payload,
                                            const MultiprocessConfig& config, bool has_setup,
                                            int rank_offset) {
  const Value args = Value::array({value_of(payload)});
  return starting(target, config.launch_method, [&]() -> std::unique_ptr<Running> {
    auto context =
        start_subprocesses(function_entry, config, has_setup ? setup_entry : "", rank_offset, args);
    return context ? std::make_unique<Running>(std::move(*context)) : nullptr;
  });
}

void run_multiprocess(const nb::object& target, const MultiprocessConfig& config) {
  const CurrentScope scope(target);
  int joined_as = -1;
  waiting([&] { init_and_run([&](int rank, const Value&) { return joined_as = rank; }, config); });
  call("run", joined_as, Value::array());
}

nb::object run_serially(launch::SerialExecutor& executor, const nb::callable& function) {
  return waiting([&] {
    return executor.run([&] {
      const Locked lock;
      return nb::object(function());
    });
  });
}

/// A backend that is not given means `all`; no `all` means get_distributed_backend().
void make_config(MultiprocessConfig* config, int rank, int local_rank, std::optional<int> world_size,
                 std::optional<int> local_world_size, const std::string& master_addr,
                 std::optional<int> master_port, const std::string& init_method, int model_parallelism,
                 int pipeline_parallelism, const std::optional<std::string>& all,
                 const std::optional<std::string>& model, const std::optional<std::string>& pipeline,
                 const std::optional<std::string>& data, const std::string& launch_method) {
  new (config) MultiprocessConfig{rank,
                                  local_rank,
                                  world_size,
                                  local_world_size,
                                  master_addr,
                                  master_port,
                                  init_method,
                                  model_parallelism,
                                  pipeline_parallelism,
                                  all,
                                  model,
                                  pipeline,
                                  data,
                                  launch::options_from({{"start_method", launch_method}}).start_method};
}

void bind_multiprocess(nb::module_& module) {
  nb::class_<MultiprocessConfig>(module, "MultiprocessConfig",
                                 "The configuration of start_multiprocess(). resolve() takes values that are "
                                 "not set from the environment.")
      .def("__init__", &make_config, nb::arg("rank"), nb::arg("local_rank"), nb::arg("world_size").none(),
           nb::arg("local_world_size").none(), nb::arg("master_addr"), nb::arg("master_port").none(),
           nb::arg("init_method"), nb::arg("model_parallelism"), nb::arg("pipeline_parallelism"),
           nb::arg("backend").none(), nb::arg("model_parallel_backend").none(),
           nb::arg("pipeline_parallel_backend").none(), nb::arg("data_parallel_backend").none(),
           nb::arg("launch_method"))
      .def_ro("world_size", &MultiprocessConfig::world_size)
      .def_ro("local_world_size", &MultiprocessConfig::local_world_size)
      .def_ro("master_port", &MultiprocessConfig::master_port)
      .def("resolve", [](MultiprocessConfig& config) { MultiprocessConfig::resolve(config); })
      .def("text", &MultiprocessConfig::text);
  module.def("start_multiprocess", &start_multiprocess, nb::arg("target"), nb::arg("payload"),
             nb::arg("config"), nb::arg("has_setup"), nb::arg("rank_offset"));
  module.def("run_multiprocess", &run_multiprocess, nb::arg("target"), nb::arg("config"));
  module.def("default_backend", &default_backend);
  module.def("get_distributed_backend", &get_distributed_backend);
  module.def("set_distributed_backend", &set_distributed_backend, nb::arg("backend"));
  module.def("init_process_group_from_backend", interruptible(&init_process_group_from_backend),
             nb::arg("backend").none() = nb::none(), nb::arg("timeout").none() = nb::none());
  module.def("init_dist", interruptible(&init_dist), nb::arg("rank"), nb::arg("local_rank"),
             nb::arg("world_size"), nb::arg("local_world_size"), nb::arg("master_addr"),
             nb::arg("master_port"), nb::arg("init_method"), nb::arg("backend").none() = nb::none());
}

/// The current environment of the process. os.environ is a copy from the interpreter's start.
nb::list environment() {
  const auto bytes = [](const std::string& text) { return nb::bytes(text.data(), text.size()); };
  nb::list all;
  for (const auto& [name, value] : launch::own_environment())
    all.append(nb::make_tuple(bytes(name), bytes(value)));
  return all;
}

void see_forks_of_the_interpreter(nb::module_& module) {
  interpreter_pid = getpid();
  module.def("_note_fork", [] { interpreter_pid = getpid(); });
  nb::dict when;
  when["after_in_child"] = module.attr("_note_fork");
  nb::module_::import_("os").attr("register_at_fork")(**when);
}

}  // namespace

void see_fork() {
  if (interpreter_pid != getpid()) begin_forked();  // Sets it, by _note_fork().
}

void bind_launch(nb::module_& module) {
  see_forks_of_the_interpreter(module);
  launch::register_function(function_entry,
                            [](int rank, const Value& args) { return call("run", rank, args); });
  launch::register_function(setup_entry,
                            [](int rank, const Value& args) { return call("set_up", rank, own_args(args)); });

  launch::set_exit_function(end_interpreter);

  nb::class_<launch::ProcessState>(module, "ProcessState", "One process of a launch.")
      .def_ro("pidfd", &launch::ProcessState::pidfd, "Readable when the process has ended.")
      .def_ro("exit_code", &launch::ProcessState::exit_code, "None while it runs; -N: signal N ended it.")
      .def_prop_ro(
          "trace",
          [](const launch::ProcessState& state) {
            return state.failure ? std::optional(state.failure->trace) : std::nullopt;
          },
          "What the process reported as it failed; else None.");
  nb::class_<Running>(module, "Running", "Processes that spawn() started.")
      .def("join", &Running::join, nb::arg("timeout").none() = nb::none(),
           "True when all have ended, False after `timeout` seconds. Raises SpawnError when one has failed.")
      .def("terminate", &Running::terminate, "Ends all processes that still run, in bounded time.")
      .def("keep", &Running::keep,
           "From now on the destructor ends the processes only if they are daemons.\n\n"
           "Otherwise the program waits for them before it ends.")
      .def("pids", &Running::pids)
      .def("wait", &Running::wait, nb::arg("local_rank"), nb::arg("timeout").none() = nb::none(),
           "True when that process has ended, False after `timeout` seconds.")
      .def("processes", &Running::processes, "All processes as they are now.")
      .def("results", &Running::results, nb::sig("def results(self) -> list[bytes | None]"),
           "The pickled return value of each process; None for a process that has returned none.");
  module.def("environment", &environment, nb::sig("def environment() -> list[tuple[bytes, bytes]]"));
  module.def("end_forkserver", &ipc::end_zygote, nb::call_guard<Unlocked>(),
             "Ends the process that the start method forkserver forks from; the next launch starts another.");
  module.def("spawn", &spawn, nb::arg("target"), nb::arg("payload"), nb::arg("options"),
             nb::arg("has_setup") = false);
  module.def("spawn_distributed", &spawn_distributed, nb::arg("target"), nb::arg("payload"),
             nb::arg("backend"), nb::arg("nproc_per_node"), nb::arg("nnodes"), nb::arg("node_rank"),
             nb::arg("master_addr"), nb::arg("master_port"), nb::arg("init_method"), nb::arg("timeout"),
             nb::arg("start_method"), nb::arg("daemon"));
  nb::class_<launch::SerialExecutor>(module, "SerialExecutor",
                                     "Runs one process at a time, of those with the same `name`. When one "
                                     "dies inside run(), the next one goes on.")
      .def(nb::init<std::string, double>(), nb::arg("name"), nb::arg("timeout") = 300.0)
      .def("run", &run_serially, nb::arg("function"),
           nb::sig("def run(self, function: collections.abc.Callable[[], typing.Any]) -> typing.Any"));
  bind_multiprocess(module);
}

}  // namespace accelmgr::python
