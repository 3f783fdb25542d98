// accelmgr._native.Manager: the handle of C++, with the parameters of a module bound to the session.
#include "accelmgr/manager.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <fmt/format.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "accelmgr/launch.hpp"
#include "config/loader.hpp"
#include "python/interpreter.hpp"
#include "python/tensors.hpp"

namespace nb = nanobind;

namespace accelmgr::python {
namespace {

using Pairs = std::vector<std::pair<std::string, at::Tensor>>;

Pairs pairs_of(const std::vector<NamedTensor>& tensors) {
  Pairs pairs;
  for (const auto& [name, tensor] : tensors) pairs.emplace_back(name, tensor);
  return pairs;
}

std::vector<NamedTensor> named(Pairs pairs) {
  std::vector<NamedTensor> tensors;
  for (auto& [name, tensor] : pairs) tensors.push_back({std::move(name), std::move(tensor)});
  return tensors;
}

std::vector<config::Setting> settings_of(const std::vector<std::pair<std::string, std::string>>& given) {
  std::vector<config::Setting> settings;
  for (const auto& [assignment, where] : given) settings.push_back({assignment, where});
  return settings;
}

/// The same memory with a storage of its own: whoever copies or pickles it takes no more than this tensor.
at::Tensor alone(const at::Tensor& view) {
  return at::from_blob(
      view.mutable_data_ptr(), view.sizes(), view.strides(), [view](void*) {},
      view.options().requires_grad(false));
}

/// The handle. A parameter of the host is bound to the master: its data and its gradient are views.
class Handle {
 public:
  Handle(const std::string& file, const std::vector<std::pair<std::string, std::string>>& settings,
         const std::map<std::string, std::string>& environment)
      : loaded_(config::load_config(file, settings_of(settings), environment)) {}

  /// `prepared` is called when parameters() and gradients() can be: there is a session, but no runner yet.
  void start(const std::string& start_method, const nb::callable& prepared) {
    const auto method = launch::options_from({{"start_method", start_method}}).start_method;
    // The host's pool of threads has no threads in a fork, and whoever hands them work waits for ever.
    if (method == StartMethod::fork && loaded_.config.runners.threads == 0)
      loaded_.config.runners.threads = 1;
    Interruption interruption;
    const auto take = [&](const std::vector<NamedTensor>& parameters,
                          const std::vector<NamedTensor>& gradients) {
      for (const auto& [name, tensor] : parameters) parameters_.emplace_back(name, alone(tensor));
      for (const auto& [name, tensor] : gradients) gradients_.emplace_back(name, alone(tensor));
      for (std::size_t i = 0; i < parameters.size(); ++i)
        places_.push_back({parameters[i].tensor.const_data_ptr(), gradients[i].tensor.const_data_ptr()});
      const Locked lock;
      prepared();
    };
    try {
      const Unlocked unlocked;
      manager_.emplace(Manager::start(
          loaded_.config, {.interrupted = interruption.hook(), .method = method, .prepared = take}));
    } catch (...) {
      interruption.rethrow();
      throw;
    }
    interruption.rethrow();
  }

  Manager& manager() {
    if (!manager_) throw UsageError("this manager was not started; call start()");
    return *manager_;
  }
  const Pairs& parameters() {
    if (parameters_.empty()) manager();
    return parameters_;
  }
  const Pairs& gradients() {
    if (gradients_.empty()) manager();
    return gradients_;
  }

  /// From now on these are the master's parameters, in the order of parameters().
  void bind(std::vector<at::Tensor> tensors) {
    if (tensors.size() != parameters_.size())
      throw UsageError(fmt::format("bind: {} tensors for {} parameters", tensors.size(), parameters_.size()));
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      tensors[i].set_data(parameters_[i].second);
      if (tensors[i].requires_grad()) tensors[i].mutable_grad() = gradients_[i].second;
    }
    bound_ = std::move(tensors);
  }

  /// Puts the gradients back that somebody has set to None, as zeros: `zero_grad(set_to_none=True)` says so;
  /// and takes that of a frozen parameter away, as plain torch has none. Throws ModelError for a parameter
  /// that is no view of the master any more, and for a gradient that is another tensor.
  void look_after_bound() {
    for (std::size_t i = 0; i < bound_.size(); ++i) {
      const auto& tensor = bound_[i];
      if (tensor.numel() == 0) continue;  // It has no address.
      const auto& name = parameters_[i].first;
      if (tensor.const_data_ptr() != places_[i].parameter)
        throw ModelError(fmt::format(
            "the memory of parameter '{}' was replaced (by to(), share_memory(), "
            "load_state_dict(assign=True) "
            "or tie_weights(), for instance): what is written there reaches no runner. Change parameters in "
            "place, or with update_model_parameters()",
            name));
      const auto& gradient = tensor.grad();
      const bool own = gradient.defined() && gradient.const_data_ptr() == places_[i].gradient;
      if (own && tensor.requires_grad()) continue;
      if (gradient.defined() && !own)
        throw ModelError(fmt::format(
            "the gradient of parameter '{}' is another tensor than the manager's; change it in place", name));
      if (!own && !tensor.requires_grad()) continue;
      gradients_[i].second.zero_();
      tensor.mutable_grad() = own ? at::Tensor() : gradients_[i].second;
    }
  }

  /// What a signal handler raised has the result as `step_result`: the runners may have been done before.
  StepResult step(std::optional<double> timeout_s, bool accumulate, bool parameters_changed) {
    auto& manager = this->manager();
    Interruption interruption;
    StepResult result;
    try {
      const Unlocked unlocked;
      result = manager.step({.timeout_s = timeout_s,
                             .accumulate = accumulate,
                             .parameters_changed = parameters_changed,
                             .interrupted = interruption.hook()});
    } catch (...) {
      interruption.rethrow();
      throw;
    }
    try {
      interruption.rethrow();
    } catch (nb::python_error& raised) {
      nb::setattr(raised.value(), "step_result", nb::cast(std::move(result)));
      throw;
    }
    return result;
  }

  const config::LoadedConfig& loaded() const noexcept { return loaded_; }
  bool started() const noexcept { return manager_.has_value(); }

 private:
  config::LoadedConfig loaded_;
  std::optional<Manager> manager_;
  /// In the session, where they stay: share_memory_() moves a storage, and all tensors over it with it.
  struct Place {
    const void* parameter;
    const void* gradient;
  };

  Pairs parameters_;
  Pairs gradients_;
  std::vector<Place> places_;
  std::vector<at::Tensor> bound_;
};

/// What a call of the C++ handle does while other threads of Python run.
template <class Body>
auto unlocked(Body&& body) {
  const Unlocked release;
  return body();
}

void bind_statistics(nb::module_& module) {
  nb::class_<RunnerStatistics>(module, "RunnerStatistics")
      .def_ro("rank", &RunnerStatistics::rank)
      .def_ro("pid", &RunnerStatistics::pid)
      .def_ro("generation", &RunnerStatistics::generation)
      .def_ro("phase", &RunnerStatistics::phase)
      .def_ro("attempt", &RunnerStatistics::attempt)
      .def_ro("samples", &RunnerStatistics::samples)
      .def_ro("peak_memory_bytes", &RunnerStatistics::peak_memory_bytes)
      .def_ro("start_ms", &RunnerStatistics::start_ms)
      .def_ro("model_ms", &RunnerStatistics::model_ms)
      .def("__repr__", [](const RunnerStatistics& self) {
        return fmt::format("RunnerStatistics(rank {}, pid {}, {}, {} samples)", self.rank, self.pid,
                           self.phase, self.samples);
      });
  nb::class_<Statistics>(module, "Statistics")
      .def_ro("steps", &Statistics::steps)
      .def_ro("attempts", &Statistics::attempts)
      .def_ro("samples", &Statistics::samples)
      .def_ro("elements", &Statistics::elements)
      .def_ro("skips", &Statistics::skips)
      .def_ro("replacements", &Statistics::replacements)
      .def_ro("losses", &Statistics::losses)
      .def_ro("parameter_version", &Statistics::parameter_version)
      .def_ro("session_bytes", &Statistics::session_bytes)
      .def_ro("manager_pid", &Statistics::manager_pid)
      .def_ro("manager_peak_memory_bytes", &Statistics::manager_peak_memory_bytes)
      .def_ro("runners", &Statistics::runners)
      .def("__repr__", [](const Statistics& self) {
        return fmt::format("Statistics({} steps, {} attempts, {} samples, {} losses, {} runners)", self.steps,
                           self.attempts, self.samples, self.losses, self.runners.size());
      });
}

void bind_checkpoints(nb::module_& module) {
  nb::class_<CheckpointWritten>(module, "CheckpointWritten")
      .def_ro("step", &CheckpointWritten::step)
      .def_ro("path", &CheckpointWritten::path)
      .def_ro("bytes", &CheckpointWritten::bytes)
      .def_ro("copy_ms", &CheckpointWritten::copy_ms)
      .def_ro("write_ms", &CheckpointWritten::write_ms)
      .def_ro("error", &CheckpointWritten::error)
      .def_ro("warnings", &CheckpointWritten::warnings)
      .def("__repr__", [](const CheckpointWritten& self) {
        return fmt::format("CheckpointWritten(step {}: {})", self.step,
                           self.error.empty() ? self.path : "not written: " + self.error);
      });
  nb::class_<Resumed>(module, "Resumed")
      .def_ro("path", &Resumed::path)
      .def_ro("step", &Resumed::step)
      .def_prop_ro("tensors", [](const Resumed& self) { return pairs_of(self.tensors); })
      .def_ro("json", &Resumed::json)
      .def_ro("refused", &Resumed::refused)
      .def_ro("run_id", &Resumed::run_id)
      .def_ro("configuration", &Resumed::configuration)
      .def("__repr__",
           [](const Resumed& self) { return fmt::format("Resumed(step {}: {})", self.step, self.path); });
}

}  // namespace

void bind_manager(nb::module_& module) {
  bind_statistics(module);
  bind_checkpoints(module);
  nb::class_<Manager::Writing>(module, "Writing");
  nb::class_<Handle>(module, "Handle")
      .def(nb::init<const std::string&, const std::vector<std::pair<std::string, std::string>>&,
                    const std::map<std::string, std::string>&>(),
           nb::arg("file"), nb::arg("settings"), nb::arg("environment"))
      .def("start", &Handle::start, nb::arg("start_method"), nb::arg("prepared"))
      .def_prop_ro("started", &Handle::started)
      .def("bind", &Handle::bind)
      .def("look_after_bound", &Handle::look_after_bound)
      .def("step", &Handle::step, nb::arg("timeout") = nb::none(), nb::arg("accumulate") = true,
           nb::arg("parameters_changed") = true)
      .def("zero_grad", [](Handle& self) { unlocked([&m = self.manager()] { m.zero_grad(); }); })
      .def("parameters", &Handle::parameters)
      .def("gradients", &Handle::gradients)
      .def("buffers", [](Handle& self) { return pairs_of(self.manager().buffers()); })
      .def("state_dict", [](Handle& self) { return pairs_of(self.manager().state_dict()); })
      .def("update_model_parameters",
           [](Handle& self, const std::vector<at::Tensor>& values) {
             unlocked([&, &m = self.manager()] { m.update_model_parameters(values); });
           })
      .def("update_buffers",
           [](Handle& self, Pairs values) {
             unlocked([&, &m = self.manager()] { m.update_buffers(named(std::move(values))); });
           })
      .def(
          "writing", [](Handle& self) { return new Manager::Writing(self.manager()); },
          nb::rv_policy::take_ownership, nb::keep_alive<0, 1>())
      .def("resize",
           [](Handle& self, int runners) { waiting([&, &m = self.manager()] { m.resize(runners); }); })
      .def("recover", [](Handle& self) { waiting([&m = self.manager()] { m.recover(); }); })
      .def("save_checkpoint",
           [](Handle& self, std::optional<double> metric, Pairs tensors, const std::string& json) {
             return waiting([&, &m = self.manager()] {
               return m.save_checkpoint(
                   {.metric = metric, .tensors = named(std::move(tensors)), .json = json});
             });
           })
      .def("checkpoints_written",
           [](Handle& self, double wait_s) {
             return waiting([&, &m = self.manager()] { return m.checkpoints_written(wait_s); });
           })
      .def_prop_ro("resumed", [](Handle& self) { return self.manager().resumed(); })
      .def_prop_ro("run_id", [](Handle& self) { return self.manager().run_id(); })
      .def("statistics", [](Handle& self) { return self.manager().statistics(); })
      .def("stop",
           [](Handle& self) {
             if (self.started()) unlocked([&m = self.manager()] { m.stop(); });
           })
      .def("kill",
           [](Handle& self) {
             if (self.started()) self.manager().kill();
           })
      .def_prop_ro("step_timeout", [](const Handle& self) { return self.loaded().config.step_timeout; })
      .def("config", [](Handle& self) { return config::to_yaml(self.loaded().config); })
      .def_prop_ro("epochs",
                   [](const Handle& self) -> std::optional<int> {
                     if (self.loaded().sources.at("data.epochs") == "default") return std::nullopt;
                     return self.loaded().config.data.epochs;
                   })
      .def(
          "unread",
          [](const Handle& self, bool own_model, bool own_data) {
            std::vector<std::tuple<std::string, std::string, std::string>> found;
            for (auto& [key, source, why] : config::unread(self.loaded(), {own_model, own_data}))
              found.emplace_back(key, source, why);
            return found;
          },
          nb::arg("own_model"), nb::arg("own_data"))
      .def("show_config", [](Handle& self) { return config::show(self.loaded()); });
  module.def("warnings",
             [](const Handle& handle, int cores) { return config::warnings(handle.loaded().config, cores); });
}

}  // namespace accelmgr::python
