// accelmgr._native.Handle: the host's side of a manager, with memory instead of tensors.
#include <fmt/format.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "accelmgr/launch.hpp"
#include "base/config/device_name.hpp"
#include "base/config/loader.hpp"
#include "base/ipc/memory.hpp"
#include "base/unique_fd.hpp"
#include "engine/client/handle.hpp"
#include "engine/replica/model.hpp"
#include "python/interpreter.hpp"
#include "python/memory.hpp"
#include "python/place.hpp"

namespace nb = nanobind;

namespace accelmgr::python {
namespace {

/// Name, dtype, shape, address of a dense tensor of Python. The caller keeps it alive during the call.
using Addressed = std::tuple<std::string, std::string, std::vector<std::int64_t>, std::uintptr_t>;

template <class Exception>
std::vector<client::Value> values_of(const std::vector<Addressed>& tensors) {
  std::vector<client::Value> values;
  values.reserve(tensors.size());
  for (const auto& [name, dtype, shape, address] : tensors)
    values.push_back({name, dtype_named<Exception>(dtype, fmt::format("'{}'", name)), shape,
                      reinterpret_cast<const std::byte*>(address)});
  return values;
}

/// The numbers of a group: learning rate, weight decay, momentum, beta1, beta2, epsilon, nesterov.
using GroupNumbers = std::tuple<double, double, double, double, double, double, bool>;
/// sgd, adam or adamw; to which norm gradients are clipped, or 0; the groups, at most 16.
using UpdateNumbers = std::tuple<std::string, double, std::vector<GroupNumbers>>;

session::Update update_of(const UpdateNumbers& numbers) {
  using Kind = session::Update::Kind;
  const auto& [kind, clip_norm, groups] = numbers;
  session::Update update{.kind = kind == "sgd"    ? Kind::sgd
                                 : kind == "adam" ? Kind::adam
                                                  : Kind::adamw,
                         .leaves_absent = 1,
                         .clip_norm = clip_norm};
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const auto& [rate, decay, momentum, beta1, beta2, epsilon, nesterov] = groups[i];
    update.groups[i % session::max_update_groups] = {rate, decay, momentum, beta1, beta2, epsilon, nesterov};
  }
  return update;
}

/// Name, dtype, shape and content of a buffer.
using BufferValue = nb::typed<nb::tuple, nb::str, nb::str, NumberTuple, nb::bytearray>;

std::vector<config::Setting> settings_of(const std::vector<std::pair<std::string, std::string>>& given) {
  std::vector<config::Setting> settings;
  settings.reserve(given.size());
  for (const auto& [assignment, where] : given) settings.push_back({assignment, where});
  return settings;
}

/// Runs `body` without the interpreter's lock, so that other threads of Python can run.
template <class Body>
auto unlocked(Body&& body) {
  const Unlocked release;
  return body();
}

class Handle {
 public:
  Handle(const std::string& file, const std::vector<std::pair<std::string, std::string>>& settings,
         const std::map<std::string, std::string>& environment)
      : loaded_(config::load_config(file, settings_of(settings), environment)) {}

  /// Calls `prepared` when there is a session, but no runner yet: parameters() and gradients() work from then
  /// on. `command`: another program, which becomes the manager.
  void start(const std::string& start_method, const nb::typed<nb::callable, nb::object(bool)>& prepared,
             const std::vector<std::string>& command, const std::string& continues) {
    const auto method = launch::options_from({{"start_method", start_method}}).start_method;
    note_context();
    Interruption interruption(work_.ptr());
    const auto take = [&](const std::shared_ptr<const session::Session>& session,
                          const session::HostView& view, const session::Manifest& manifest,
                          bool needs_values) {
      session_ = session;
      view_.emplace(view);
      manifest_ = manifest;
      const Locked lock;
      prepared(needs_values);
    };
    try {
      const Unlocked unlocked;
      handle_.emplace(loaded_.config, client::StartSettings{.interrupted = interruption.hook(),
                                                            .method = method,
                                                            .command = command,
                                                            .prepared = take,
                                                            .continues = continues});
    } catch (...) {
      interruption.rethrow();
      throw;
    }
    interruption.rethrow();
    loaded_.config.nprocs = handle_->config().nprocs;
    loaded_.config.runners = handle_->config().runners;  // With the devices that the manager has chosen.
  }

  /// Attaches to the service at `path`. Its configuration takes the place of this one's.
  void attach(const std::string& path, const std::string& name, double timeout_s, bool keep_gradients) {
    if (handle_) throw UsageError("attach() was called on a manager that was already started");
    Interruption interruption;
    try {
      const Unlocked unlocked;
      handle_.emplace(path, client::AttachSettings{.name = name,
                                                   .timeout_s = timeout_s,
                                                   .interrupted = interruption.hook(),
                                                   .keep_gradients = keep_gradients});
    } catch (...) {
      interruption.rethrow();
      throw;
    }
    interruption.rethrow();
    session_ = handle_->session();
    view_.emplace(handle_->view());
    manifest_ = handle_->manifest();
    loaded_.config = handle_->config();
    for (auto& [key, source] : loaded_.sources) source = "the service at " + path;
  }

  client::Handle& started() {
    if (!handle_) throw UsageError("this manager was not started; call start()");
    return *handle_;
  }
  bool is_started() const noexcept { return handle_.has_value(); }

  std::vector<Place> parameters() const {
    return session_ ? parameters_in(view_->parameters(), session_) : std::vector<Place>{};
  }
  /// Another copy of the parameters, without values: its memfd, which is open as long as a place lives, and
  /// the places.
  std::pair<int, std::vector<Place>> shared_parameters() const {
    struct Shared {
      base::UniqueFd fd;
      ipc::Mapping map;
    };
    const auto bytes = session_->header().bytes.parameters;
    auto fd = ipc::create_memfd("accelmgr-parameters", bytes, ipc::Allocate::later);
    ipc::Mapping map(fd.get(), 0, bytes, ipc::Access::read_write);
    map.keep_from_children();
    const auto shared = std::make_shared<const Shared>(std::move(fd), std::move(map));
    return {shared->fd.get(), parameters_in(shared->map.data(), shared)};
  }
  /// None for a parameter that the session has no gradient of: it is frozen.
  std::vector<std::optional<Place>> gradients() const {
    std::vector<std::optional<Place>> places;
    if (!session_) return places;
    for (std::size_t i = 0; i < manifest_.tensors.size(); ++i) {
      const auto& entry = manifest_.tensors[i];
      auto& place = places.emplace_back();
      if (session::has_gradient(*session_, manifest_, i))
        place = place_of(entry, entry.gradient_dtype(), view_->gradients() + entry.gradient,
                         entry.gradient_strides(), session_);
    }
    return places;
  }
  using Moments = std::vector<std::optional<Place>>;
  /// The first moments of the parameters, and the second ones; None for those that the session cannot update.
  std::pair<Moments, Moments> moments() const {
    std::pair<Moments, Moments> places;
    auto* const first = view_->moments();
    for (const auto& [memory, to] : {std::pair(first, &places.first),
                                     std::pair(first + session_->header().bytes.trained, &places.second)}) {
      const auto all = parameters_in(memory, session_);
      for (std::size_t i = 0; i < all.size(); ++i) {
        auto& place = to->emplace_back();
        if (manifest_.tensors[i].group != session::Group::frozen) place = all[i];
      }
    }
    return places;
  }
  std::vector<std::uint64_t> updates() {
    std::vector<std::uint64_t> counts;
    for (std::size_t i = 0; i < manifest_.tensors.size(); ++i) counts.push_back(started().updates(i));
    return counts;
  }

  /// Each buffer's name, and its further names.
  std::vector<std::pair<std::string, std::vector<std::string>>> persistent_buffers() const {
    std::vector<std::pair<std::string, std::vector<std::string>>> found;
    for (const auto& entry : manifest_.buffers)
      if (entry.persistent) found.emplace_back(entry.name, entry.aliases);
    return found;
  }
  /// Copies of the buffers of the last committed step.
  nb::typed<nb::list, BufferValue> buffers() {
    nb::list list;
    for (const auto& [name, dtype, shape, data] : started().buffers())
      list.append(nb::make_tuple(name, nb::str(name_of(dtype).data()), tuple_of(shape),
                                 nb::bytearray(data, dense_bytes(dtype, shape))));
    return list;
  }

  /// The name of each buffer, and its shape.
  std::vector<std::pair<std::string, NumberTuple>> buffer_shapes() const {
    std::vector<std::pair<std::string, NumberTuple>> shapes;
    for (const auto& entry : manifest_.buffers) shapes.emplace_back(entry.name, tuple_of(entry.shape));
    return shapes;
  }
  /// Copies the buffers of the last committed step to the addresses of dense tensors, in the order of
  /// buffer_shapes(); 0: not this one. Does not write what is the same.
  void copy_buffers(const std::vector<std::uintptr_t>& to) const {
    const auto* committed = session_->result_buffers(session_->word().index);
    for (std::size_t i = 0; i < to.size(); ++i) {
      const auto& entry = manifest_.buffers.at(i);
      auto* const buffer = reinterpret_cast<std::byte*>(to[i]);
      if (buffer != nullptr && std::memcmp(buffer, committed + entry.offset, entry.bytes) != 0)
        std::memcpy(buffer, committed + entry.offset, entry.bytes);
    }
  }

  /// The indices of the buffers whose bytes differ from those at the addresses, which are as for
  /// copy_buffers().
  std::vector<std::size_t> differing_buffers(const std::vector<std::uintptr_t>& at) const {
    const auto* committed = session_->result_buffers(session_->word().index);
    std::vector<std::size_t> numbers;
    for (std::size_t i = 0; i < at.size(); ++i) {
      const auto& entry = manifest_.buffers.at(i);
      const auto* const buffer = reinterpret_cast<const std::byte*>(at[i]);
      if (buffer != nullptr && std::memcmp(buffer, committed + entry.offset, entry.bytes) != 0)
        numbers.push_back(i);
    }
    return numbers;
  }

  /// Appends the result to `made` before it throws what a signal handler raised: the step may have counted
  /// before that, and what this returned would be lost if the interpreter called the handler afterwards.
  void step(nb::typed<nb::list, StepResult> made, std::optional<double> timeout_s, bool accumulate,
            bool parameters_changed, bool repeat,
            std::optional<std::pair<std::uint32_t, std::uint64_t>> inner,
            const std::optional<UpdateNumbers>& update) {
    auto& handle = started();
    Interruption interruption(work_.ptr());
    StepResult result;
    try {
      const Unlocked unlocked;
      const StepOptions options{.timeout_s = timeout_s,
                                .accumulate = accumulate,
                                .repeat = repeat,
                                .parameters_changed = parameters_changed,
                                .interrupted = interruption.hook()};
      result = update ? handle.step(options, update_of(*update))
                      : handle.step(options, !inner              ? client::StepKind::outer
                                             : inner->second > 0 ? client::StepKind::inner
                                                                 : client::StepKind::first_inner);
      result.repeated = inner ? inner->first : 0;
    } catch (...) {
      interruption.rethrow();
      throw;
    }
    try {
      interruption.rethrow();
    } catch (const nb::python_error&) {
      made.append(nb::cast(std::move(result)));
      throw;
    }
    made.append(nb::cast(std::move(result)));
  }

  void begin_service_steps(int count, std::optional<double> timeout_s, const UpdateNumbers& update) {
    auto& handle = started();
    const Unlocked unlocked;
    handle.begin_service_steps(count, {.timeout_s = timeout_s, .accumulate = false}, update_of(update));
  }

  /// Whether the steps are under way, what has ended them, and the results after the first `known`.
  std::tuple<bool, std::string, std::vector<StepResult>> service_steps(std::size_t known) {
    auto& handle = started();
    const Unlocked unlocked;
    auto steps = handle.service_steps(known);
    return {steps.under_way || !steps.is_all, std::move(steps.error), std::move(steps.results)};
  }

  void while_waiting(const nb::typed<nb::callable, nb::object()>& work) { work_ = work; }

  const config::LoadedConfig& loaded() const noexcept { return loaded_; }

  /// Keys that a source other than the defaults has set.
  std::set<std::string> set_keys() const {
    std::set<std::string> keys;
    for (const auto& [key, source] : loaded_.sources)
      if (source != "default") keys.insert(key);
    return keys;
  }

 private:
  std::vector<Place> parameters_in(std::byte* memory, const std::shared_ptr<const void>& owner) const {
    std::vector<Place> places;
    const auto values = replica::places_of(memory, manifest_);
    for (std::size_t i = 0; i < values.size(); ++i)
      places.push_back(place_of(manifest_.tensors[i], manifest_.tensors[i].dtype, values[i].data,
                                values[i].strides, owner));
    return places;
  }

  config::LoadedConfig loaded_;
  nb::object work_;  ///< Called while start() and step() wait.
  std::optional<client::Handle> handle_;
  std::shared_ptr<const session::Session> session_;
  std::optional<session::HostView> view_;
  session::Manifest manifest_;
};

/// A context manager that calls begin_writing() and end_writing(). It is in C++, because a signal handler
/// could end one of Python after it has begun writing, but before it knows.
struct Writing {
  Handle& handle;
};

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

void bind_manager(nb::module_& module) {
  nb::class_<Writing>(module, "Writing",
                      "Writes in place inside `with` are one update: see Handle.writing().")
      .def("__enter__", [](Writing& self) { self.handle.started().begin_writing(client::Written::all); })
      .def(
          "__exit__",
          [](Writing& self, nb::handle type, nb::handle, nb::handle) {
            self.handle.started().end_writing(type.is_none());
          },
          nb::arg("type").none(), nb::arg("error").none(), nb::arg("traceback").none());
  nb::class_<Alone>(module, "Alone", "See Handle.alone().")
      .def("__enter__", &Alone::enter)
      .def(
          "__exit__", [](Alone& self, nb::handle, nb::handle, nb::handle) { self.leave(); },
          nb::arg("type").none(), nb::arg("error").none(), nb::arg("traceback").none());
  nb::class_<Handle>(
      module, "Handle",
      "The host's side of a manager. One thread at a time; not usable in a fork of the host.\n"
      "\n"
      "Sources of the configuration, weakest first: `file` (\"\": none), `environment` (ACCELMGR_...),\n"
      "and `settings`, each of which is `key=value` and the name that error messages use for it. A\n"
      "tensor is passed as name, dtype, shape and memory: see Described and Addressed in\n"
      "accelmgr._memory.tensors.")
      .def(nb::init<const std::string&, const std::vector<std::pair<std::string, std::string>>&,
                    const std::map<std::string, std::string>&>(),
           nb::arg("file"), nb::arg("settings"), nb::arg("environment"))
      .def("start", &Handle::start, nb::arg("start_method"), nb::arg("prepared"),
           nb::arg("command") = std::vector<std::string>{}, nb::arg("continues") = "",
           "Calls `prepared` when there are parameters() and gradients(), before any runner starts. Its "
           "argument: "
           "whether it is to write the parameters.\n\n"
           "command: another program, which becomes the manager. continues: continuation() of an earlier "
           "manager, which this one goes on from.")
      .def("while_waiting", &Handle::while_waiting, nb::arg("work"),
           "`work` is called about every 20 ms while start() and step() wait, in their thread.")
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
          "device", [](const Handle& self) { return config::name_of(self.loaded().config.runners.device); },
          "runners.device.")
      .def_prop_ro("protects_parameters",
                   [](const Handle& self) { return self.loaded().config.runners.protect_parameters; })
      .def_prop_ro(
          "kinds",
          [](const Handle& self) {
            const auto& config = self.loaded().config;
            return std::pair(config.model.kind, config.data.kind);
          },
          "model.kind and data.kind.")
      .def("step", &Handle::step, nb::arg("made"), nb::arg("timeout") = nb::none(),
           nb::arg("accumulate") = true, nb::arg("parameters_changed") = true, nb::arg("repeat") = false,
           nb::arg("inner") = nb::none(), nb::arg("update") = nb::none(),
           "Appends the result to `made`, also if it then raises what a signal handler has raised. inner: of "
           "an inner step, how many were made again before it, and how many its runners have made since they "
           "have "
           "the optimizer. update: the session makes it, as a part of the step.")
      .def("begin_service_steps", &Handle::begin_service_steps, nb::arg("count"), nb::arg("timeout").none(),
           nb::arg("update"), "The service makes inner steps, also if this process ends.")
      .def("service_steps", &Handle::service_steps, nb::arg("known"),
           "Of these steps, or of those that attach() has found: whether there are more to come, what has "
           "ended "
           "them if that is in no result, and the results after the first `known`.")
      .def(
          "cancel_service_steps",
          [](Handle& self) { unlocked([&m = self.started()] { m.cancel_service_steps(); }); },
          "Ends them; blocks while one is under way.")
      .def_prop_ro(
          "found_steps", [](Handle& self) { return self.started().found_steps(); },
          "For how many steps attach() has found that nobody has waited.")
      .def_prop_ro(
          "is_attached", [](Handle& self) { return self.started().is_attached(); },
          "Whether the manager is a service.")
      .def("moments", &Handle::moments,
           "The first moments of the parameters, and the second ones; None for those that the session cannot "
           "update.")
      .def("updates", &Handle::updates, "How many updates each parameter has had.")
      .def(
          "set_update",
          [](Handle& self, std::size_t parameter, std::optional<std::uint64_t> group, std::uint64_t updates) {
            self.started().set_update(parameter, group.value_or(session::no_update_group), updates);
          },
          nb::arg("parameter"), nb::arg("group").none(), nb::arg("updates"),
          "Between steps: the group of a parameter, None if it is not updated, and how many updates its "
          "moments have had.")
      .def(
          "clear_moments",
          [](Handle& self, std::uint32_t moments) {
            unlocked([&, &m = self.started()] { m.clear_moments(static_cast<session::Moments>(moments)); });
          },
          nb::arg("moments"),
          "Room for 0, 1 or 2 moments of each parameter, as zeros. No other host goes on with them before "
          "use_moments().")
      .def(
          "use_moments",
          [](Handle& self, std::uint32_t moments) {
            self.started().use_moments(static_cast<session::Moments>(moments));
          },
          nb::arg("moments"), "All of them are written.")
      .def_prop_ro(
          "is_updated", [](Handle& self) { return self.started().is_updated(); },
          "Whether the last committed step has updated the parameters in the session.")
      .def_prop_ro(
          "moments_used",
          [](Handle& self) {
            return static_cast<std::uint32_t>(self.started().view().control().moments_used.load());
          },
          "How many moments the last optimizer has used.")
      .def("zero_grad", [](Handle& self) { unlocked([&m = self.started()] { m.zero_grad(); }); })
      .def(
          "touched",
          [](Handle& self) {
            const auto touched = self.started().touched();
            const std::string flags(touched.begin(), touched.end());
            return nb::bytes(flags.data(), flags.size());
          },
          "A byte for each parameter: 1 if a committed step has given it a gradient since it was zeroed.")
      .def(
          "set_touched",
          [](Handle& self, const std::vector<std::size_t>& parameters, bool touched) {
            self.started().set_touched(parameters, touched);
          },
          nb::arg("parameters"), nb::arg("touched"),
          "Records what the host did to gradients, by their numbers.")
      .def("parameters", &Handle::parameters,
           "The master's parameters, each once; empty before there is a session.")
      .def("shared_parameters", &Handle::shared_parameters,
           "Another copy of the parameters, without values: a memfd, which is open as long as a place lives, "
           "and the places. Children that are forked from now on do not have its mapping.")
      .def("gradients", &Handle::gradients,
           "The master's gradients, in the order of parameters(); None for one that is frozen.")
      .def(
          "frozen_written", [](Handle& self) { self.started().frozen_written(); },
          "Frozen parameters were written: devices copy them again for the next step.")
      .def(
          "unfreeze",
          [](Handle& self, const std::vector<std::size_t>& parameters) {
            unlocked([&, &m = self.started()] { m.unfreeze(parameters); });
          },
          nb::arg("parameters"), "Makes gradients for them, by their numbers. Not during a step.")
      .def("persistent_buffers", &Handle::persistent_buffers,
           "Each persistent buffer's name, and further names of the same buffer.")
      .def("buffers", &Handle::buffers, "Copies of the buffers of the last committed step.")
      .def("buffer_shapes", &Handle::buffer_shapes, "The name of each buffer, and its shape.")
      .def("copy_buffers", &Handle::copy_buffers, nb::arg("to"),
           "Copies them to the addresses of dense tensors, in the order of buffer_shapes(); 0: not this one.")
      .def("differing_buffers", &Handle::differing_buffers, nb::arg("at"),
           "The numbers of those that have other bytes at these addresses; 0: not this one.")
      .def(
          "update_buffers",
          [](Handle& self, const std::vector<Addressed>& tensors) {
            const auto values = values_of<ModelError>(tensors);
            unlocked([&, &m = self.started()] { m.update_buffers(values); });
          },
          nb::arg("values"), "Raises ModelError before anything is written.")
      .def(
          "writing", [](Handle& self) { return Writing{self}; }, nb::keep_alive<0, 1>(),
          "No runner computes with half of what is written inside. What an exception ends is not whole. "
          "Raises UsageError inside another one.")
      .def(
          "begin_writing", [](Handle& self) { self.started().begin_writing(client::Written::trained); },
          "As writing(), of parameters that are trained alone.")
      .def(
          "end_writing", [](Handle& self, bool whole) { self.started().end_writing(whole); },
          nb::arg("whole") = true, "whole: the caller vouches that no parameter is half written any more.")
      .def("revert_parameters", [](Handle& self) { self.started().revert_parameters(); })
      .def_prop_ro("is_writing", [](Handle& self) { return self.started().is_writing(); })
      .def_prop_ro(
          "left_gradients",
          [](Handle& self) {
            static constexpr std::array<std::optional<std::string_view>, 3> names = {std::nullopt,
                                                                                     "unapplied", "applied"};
            return names.at(static_cast<std::size_t>(self.started().left_gradients()));
          },
          "What an earlier host of a service has left: None, \"unapplied\" or \"applied\".")
      .def_prop_ro(
          "overwrites_next", [](Handle& self) { return self.started().overwrites_next(); },
          "Whether the next step overwrites gradients, whatever its arguments say.")
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
      .def_prop_ro(
          "replaces_runners",
          [](const Handle& self) { return self.loaded().config.runners.on_loss != LossPolicy::fail; })
      .def_prop_ro(
          "team_shrinks",
          [](const Handle& self) { return self.loaded().config.runners.on_loss == LossPolicy::shrink; })
      .def("refresh",
           [](Handle& self) {
             note_context();
             waiting([&m = self.started()] { m.refresh(); });
           })
      .def(
          "save_checkpoint",
          [](Handle& self, std::optional<double> metric, const std::vector<Addressed>& tensors,
             const std::string& json) {
            client::Extras extras{
                .metric = metric, .tensors = values_of<CheckpointError>(tensors), .json = json};
            return waiting([&, &m = self.started()] { return m.save_checkpoint(extras); });
          },
          nb::arg("metric").none(), nb::arg("tensors"), nb::arg("json"),
          "Returns the ms for which it blocked the caller.")
      .def(
          "checkpoints_written",
          [](Handle& self, nb::typed<nb::list, CheckpointWritten> told, double wait_s) {
            std::vector<CheckpointWritten> written;
            const auto tell = [&] {
              for (auto& each : written) told.append(nb::cast(std::move(each)));
            };
            try {
              waiting([&, &m = self.started()] { written = m.checkpoints_written(wait_s); });
            } catch (const nb::python_error&) {
              tell();
              throw;
            }
            tell();
          },
          nb::arg("told"), nb::arg("wait_s"),
          "Appends them to `told`, also if it then raises what a signal handler has raised.")
      .def_prop_ro("checkpoint_requested", [](Handle& self) { return self.started().checkpoint_requested(); })
      .def_prop_ro("resumed", [](Handle& self) { return self.started().resumed(); })
      .def(
          "continuation", [](Handle& self) { return self.started().continuation(); },
          "Where it stands, after stop(): for start() of a manager of a changed model.")
      .def_prop_ro("keeps_last_step",
                   [](const Handle& self) { return self.loaded().config.data.keep_last_step; })
      .def_prop_ro("nprocs", [](const Handle& self) { return self.loaded().config.nprocs; })
      .def_prop_ro(
          "step_shape",
          [](const Handle& self) {
            const auto& config = self.loaded().config;
            return std::tuple(std::max(config.nprocs, config.runners.max_runners),
                              config.grad_accumulation_steps, config.batch_size_per_device);
          },
          "The most runners, grad_accumulation_steps, and batch_size_per_device.")
      .def_prop_ro("run_id", [](Handle& self) { return self.started().run_id(); })
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
          "Kills runners, fork server and manager at once.")
      .def_prop_ro("step_timeout", [](const Handle& self) { return self.loaded().config.step_timeout; })
      .def_prop_ro("set_keys", &Handle::set_keys, "Keys of the configuration that a source has set.")
      .def(
          "config", [](Handle& self) { return config::to_yaml(self.loaded().config); },
          "The whole configuration, as YAML.")
      .def_prop_ro(
          "epochs",
          [](const Handle& self) -> std::optional<int> {
            if (self.loaded().sources.at("data.epochs") == "default") return std::nullopt;
            return self.loaded().config.data.epochs;
          },
          "`data.epochs`; None if no source has set it.")
      .def(
          "unread",
          [](const Handle& self, bool own_model, bool own_data) {
            std::vector<std::tuple<std::string, std::string, std::string>> found;
            for (auto& [key, source, why] : config::unread(self.loaded(), {own_model, own_data}))
              found.emplace_back(key, source, why);
            return found;
          },
          nb::arg("own_model"), nb::arg("own_data"),
          "Keys that were set and have no effect, each with its source (\"flag\": `settings`) and the "
          "reason.");
}

}  // namespace accelmgr::python
