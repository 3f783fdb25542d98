// The life of a manager: its start, the runners, its end.
#include "python/manager/handle.hpp"

#include <nanobind/stl/map.h>

#include <utility>

#include "accelmgr/launch.hpp"

namespace nb = nanobind;

namespace accelmgr::python {
namespace {

std::vector<config::Setting> settings_of(const std::vector<std::pair<std::string, std::string>>& given) {
  std::vector<config::Setting> settings;
  settings.reserve(given.size());
  for (const auto& [assignment, where] : given) settings.push_back({assignment, where});
  return settings;
}

/// In C++, because a signal handler could end a context manager of Python before it knows what it has
/// claimed.
class Alone {
 public:
  Alone(Handle& handle, std::string call) : handle_(handle), call_(std::move(call)) {}
  void enter() {
    if (handle_.is_started()) handle_.started().claim(call_.c_str());
    has_claimed_ = handle_.is_started();
  }
  void leave() noexcept {
    if (std::exchange(has_claimed_, false)) handle_.started().release();
  }

 private:
  Handle& handle_;
  std::string call_;
  bool has_claimed_ = false;
};

}  // namespace

Handle::Handle(const std::string& file, const std::vector<std::pair<std::string, std::string>>& settings,
               const std::map<std::string, std::string>& environment)
    : loaded_(config::load_config(file, settings_of(settings), environment)) {}

void Handle::start(const std::string& start_method, const nb::typed<nb::callable, nb::object(bool)>& prepared,
                   const std::vector<std::string>& command, const std::string& continues) {
  const auto method = launch::options_from({{"start_method", start_method}}).start_method;
  note_context();
  const auto take = [&](const std::shared_ptr<const session::Session>& session, const session::HostView& view,
                        const session::Manifest& manifest, bool needs_values) {
    session_ = session;
    view_.emplace(view);
    manifest_ = manifest;
    const Locked lock;
    prepared(needs_values);
  };
  waiting(
      [&] {
        handle_.emplace(loaded_.config,
                        client::StartSettings{
                            .method = method, .command = command, .prepared = take, .continues = continues});
      },
      work_.ptr());
  loaded_.config.nprocs = handle_->config().nprocs;
  loaded_.config.runners = handle_->config().runners;  // With the devices that the manager has chosen.
}

void Handle::attach(const std::string& path, const std::string& name, double timeout_s, bool keep_gradients) {
  if (handle_) throw UsageError("attach() was called on a manager that was already started");
  waiting([&] {
    handle_.emplace(
        path, client::AttachSettings{.name = name, .timeout_s = timeout_s, .keep_gradients = keep_gradients});
  });
  session_ = handle_->session();
  view_.emplace(handle_->view());
  manifest_ = handle_->manifest();
  loaded_.config = handle_->config();
  for (auto& [key, source] : loaded_.sources) source = "the service at " + path;
}

void bind_manager(nb::module_& module) {
  nb::class_<Alone>(module, "Alone", "See Handle.alone().")
      .def("__enter__", &Alone::enter)
      .def(
          "__exit__", [](Alone& self, nb::handle, nb::handle, nb::handle) { self.leave(); },
          nb::arg("type").none(), nb::arg("error").none(), nb::arg("traceback").none());
  HandleClass type(
      module, "Handle",
      "The host's side of a manager. One thread at a time; not usable in a fork of the host.\n"
      "\n"
      "Sources of the configuration, weakest first: `file` (\"\": none), `environment` (ACCELMGR_...),\n"
      "and `settings`, each of which is `key=value` and the name that error messages use for it. A\n"
      "tensor is passed as name, dtype, shape and memory: see Described and Addressed in\n"
      "accelmgr._memory.tensors.");
  type.def(nb::init<const std::string&, const std::vector<std::pair<std::string, std::string>>&,
                    const std::map<std::string, std::string>&>(),
           nb::arg("file"), nb::arg("settings"), nb::arg("environment"))
      .def("start", &Handle::start, nb::arg("start_method"), nb::arg("prepared"),
           nb::arg("command") = std::vector<std::string>{}, nb::arg("continues") = "",
           "Calls `prepared` when there are parameters() and gradients(), before any runner starts. Its "
           "argument: "
           "whether it is to write the parameters.\n\n"
           "command: another program, which becomes the manager. continues: continuation() of an earlier "
           "manager, which this one goes on from.")
      .def("attach", &Handle::attach, nb::arg("path"), nb::arg("name"), nb::arg("timeout"),
           nb::arg("keep_gradients") = false,
           "Drives the session of the service at `path` from now on. The configuration is the service's.")
      .def(
          "share_with_children", [](Handle& self) { self.started().share_with_children(); },
          "Processes that this one forks share the memory of parameters and gradients with it from now on.")
      .def(
          "alone", [](Handle& self, std::string call) { return Alone(self, std::move(call)); },
          nb::arg("call"), nb::keep_alive<0, 1>(),
          "Inside `with`, other threads get UsageError, also between the calls of this one. Nests.")
      .def_prop_ro("unfinished", [](Handle& self) { return self.started().unfinished(); })
      .def_prop_ro("started", &Handle::is_started)
      .def_prop_ro(
          "is_attached", [](Handle& self) { return self.started().is_attached(); },
          "Whether the manager is a service.")
      .def(
          "resize",
          [](Handle& self, int runners) { waiting([&, &m = self.started()] { m.resize(runners); }); },
          nb::arg("runners"))
      .def("recover",
           [](Handle& self) {
             note_context();
             waiting([&m = self.started()] { m.recover(); });
           })
      .def(
          "call", [](Handle& self, int rank) { waiting([&, &m = self.started()] { m.call(rank); }); },
          nb::arg("rank"), "The replica of the rank makes the call that Calls has for it.")
      .def_prop_ro("fork_server_ended", [](Handle& self) { return self.started().fork_server_ended(); })
      .def_prop_ro(
          "gave_up", [](Handle& self) { return self.started().session()->control().given_up.load() != 0; },
          "Whether the manager process replaces no runner any more.")
      .def("refresh",
           [](Handle& self) {
             note_context();
             waiting([&m = self.started()] { m.refresh(); });
           })
      .def(
          "statistics", [](Handle& self, bool memory) { return self.started().statistics(memory); },
          nb::arg("memory") = true,
          "Any thread may call it. memory=False: without peak_memory_bytes, which takes most of the time.")
      .def("stop",
           [](Handle& self) {
             if (self.is_started()) unlocked([&m = self.started()] { m.stop(); });
           })
      .def(
          "kill",
          [](Handle& self) {
            if (self.is_started()) self.started().kill();
          },
          "Kills runners, fork server and manager at once.");
  bind_configuration(type);
  bind_steps(type);
  bind_moments(type);
  bind_tensors(type);
  bind_writing(module, type);
  bind_checkpoints(type);
}

}  // namespace accelmgr::python
