// A model of Python as the replica of a runner. accelmgr._runner.replica computes; this file passes
// addresses.
#include "python/replica.hpp"

#include <fmt/format.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <set>
#include <tuple>

#include "accelmgr/errors.hpp"
#include "base/config/device_name.hpp"
#include "base/log.hpp"
#include "engine/replica/generator_state.hpp"
#include "engine/replica/model.hpp"
#include "engine/replica/replica.hpp"
#include "engine/runner/rank_setup.hpp"
#include "python/interpreter.hpp"
#include "python/memory.hpp"
#include "python/object_reference.hpp"
#include "python/runner_side.hpp"

namespace nb = nanobind;

namespace accelmgr::python {
namespace {

using replica::Tensor;

/// A Description of accelmgr._runner.replica: name, dtype, shape, strides, address, identity, and whether
/// it requires a gradient (a parameter), or is persistent (a buffer).
using Described = std::tuple<std::string, std::string, std::vector<std::int64_t>, std::vector<std::int64_t>,
                             std::uintptr_t, std::uintptr_t, bool>;

std::vector<Tensor> tensors_of(const char* what, const nb::handle& list) {
  std::vector<Tensor> tensors;
  for (auto& [name, dtype, shape, strides, address, identity, flag] :
       nb::cast<std::vector<Described>>(list)) {
    const auto type = dtype_named<ModelError>(dtype, fmt::format("{} '{}' of the model", what, name));
    tensors.push_back({.name = std::move(name),
                       .dtype = type,
                       .shape = std::move(shape),
                       .strides = std::move(strides),
                       .data = reinterpret_cast<std::byte*>(address),
                       .identity = identity,
                       .requires_grad = flag,
                       .persistent = flag});
  }
  return tensors;
}

/// A list of Places of accelmgr._runner.replica.
nb::list list_of(const session::Manifest& manifest, std::span<const replica::Place> places,
                 DType session::TensorEntry::*dtype_of) {
  nb::list list;
  for (std::size_t i = 0; i < places.size(); ++i) {
    const auto& [data, strides] = places[i];
    const auto elements = extent_of(manifest.tensors[i].shape, strides);
    const auto dtype = manifest.tensors[i].*dtype_of;
    list.append(nb::make_tuple(Memory{data, elements * size_of(dtype)},
                               nb::str(accelmgr::name_of(dtype).data()), tuple_of(strides)));
  }
  return list;
}

class PythonReplica final : public replica::Replica {
  /// Runs `body` with the interpreter's lock. Throws ModelError, what the runner has thrown, or Error for a
  /// device that failed.
  template <class Body>
  auto called(Body&& body) {
    try {
      return in_python<ModelError>(std::forward<Body>(body));
    } catch (const ModelError&) {
      if (runner_.thrown) std::rethrow_exception(std::exchange(runner_.thrown, nullptr));
      throw;
    }
  }

 public:
  PythonReplica(nb::object replica, const std::string& loss_weight) : replica_(std::move(replica)) {
    runner_.loss_weight = loss_weight;
  }

  replica::Description describe() override {
    return called([&] {
      const nb::object described = (*replica_).attr("describe")();
      replica::Description description{tensors_of("parameter", nb::object(described[0])),
                                       tensors_of("buffer", nb::object(described[1])),
                                       nb::cast<bool>(described[2])};
      const auto exact = nb::cast<std::set<std::string>>(described[3]);
      const auto not_saved = nb::cast<std::set<std::string>>(described[4]);
      const auto of_host = nb::cast<std::set<std::string>>(described[5]);
      for (auto& buffer : description.buffers) buffer.of_model = !of_host.contains(buffer.name);
      for (auto& parameter : description.parameters) {
        parameter.rounds = !exact.contains(parameter.name);
        parameter.persistent = !not_saved.contains(parameter.name);
      }
      buffers_ = replica::tensors_of(description).buffers;
      return description;
    });
  }

  void bind(const replica::Binding& to) override {
    runner_.places.assign(to.places.begin(), to.places.end());
    runner_.binding.emplace(replica::Binding{to.manifest, runner_.places, to.gradients, to.gradient_places,
                                             to.parameters, to.progress});
    called([&] {
      (*replica_).attr("bind")(list_of(to.manifest, to.places, &session::TensorEntry::runner_dtype),
                               nb::cast(&runner_, nb::rv_policy::reference));
    });
  }

  void read_parameters(const session::Manifest& manifest, std::span<const replica::Place> places) override {
    called([&] {
      (*replica_).attr("read_parameters")(list_of(manifest, places, &session::TensorEntry::dtype));
    });
  }

  void seed(std::uint64_t seed) override {
    called([&] { (*replica_).attr("seed")(seed); });
  }

  void begin_attempt() override {
    called([&] { (*replica_).attr("begin_attempt")(); });
  }

  void load_parameters() override {
    called([&] { (*replica_).attr("load_parameters")(); });
  }

  void parameter_changed(const std::string& name) override {
    called([&] { (*replica_).attr("parameter_changed")(name); });
  }

  double apply(std::span<const std::byte* const> mean, double scale) override {
    return called([&] {
      nb::list gradients;
      for (std::size_t i = 0; i < mean.size(); ++i) gradients.append(gradient_at(i, mean[i]));
      return nb::cast<double>((*replica_).attr("apply")(gradients, scale));
    });
  }

  void call() override {
    called([&] { (*replica_).attr("call")(); });
  }

  replica::TeamMember* team_member() override {
    return called([&] {
      const nb::object member = (*replica_).attr("team_member")();
      if (nb::isinstance<nb::str>(member)) throw UsageError(nb::cast<std::string>(member));
      return nb::cast<replica::TeamMember*>(member);
    });
  }

  void run(std::span<const replica::Field> batch, double divisor) override {
    called([&] {
      nb::list fields;
      for (const auto& field : batch) {
        std::size_t bytes = size_of(field.dtype);
        for (const auto size : field.shape) bytes *= static_cast<std::size_t>(size);
        fields.append(nb::make_tuple(field.name, nb::str(name_of(field.dtype).data()), tuple_of(field.shape),
                                     Memory{const_cast<std::byte*>(field.data), bytes}));
      }
      (*replica_).attr("run")(fields, divisor);
    });
  }

  replica::Totals collect() override {
    return called([&] {
      auto [loss, scalars] = nb::cast<std::pair<double, std::vector<std::pair<std::string, double>>>>(
          (*replica_).attr("collect")());
      return replica::Totals{loss, std::move(scalars)};
    });
  }

  void save(const replica::State& to) override {
    called([&] {
      if (to.buffers != nullptr) {
        settle();
        replica::store_buffers(buffers_, runner_.binding->manifest, to.buffers);
      }
      const nb::object state = (*replica_).attr("generator_state")();
      const auto* bytes =
          reinterpret_cast<const std::byte*>(nb::cast<std::uintptr_t>(state.attr("data_ptr")()));
      replica::store_generator({bytes, nb::cast<std::size_t>(state.attr("nbytes"))}, to.generator);
    });
  }

  void load(const replica::ConstState& from) override {
    called([&] {
      settle();
      replica::load_buffers(buffers_, runner_.binding->manifest, from.buffers);
      (*replica_).attr("buffers_loaded")();
      const auto state = replica::stored_generator(from.generator);
      if (!state.empty()) (*replica_).attr("load_generator")(nb::bytearray(state.data(), state.size()));
    });
  }

 private:
  /// A Place of accelmgr._runner.replica. None if there is no gradient.
  nb::object gradient_at(std::size_t index, const std::byte* begin) const {
    if (begin == nullptr) return nb::none();
    const auto& entry = runner_.binding->manifest.tensors[index];
    return nb::make_tuple(Memory{const_cast<std::byte*>(begin), entry.gradient_bytes()},
                          nb::str(accelmgr::name_of(entry.gradient_dtype()).data()),
                          tuple_of(entry.gradient_strides()));
  }

  /// Puts the buffers back where the model has assigned other tensors, and notes buffers that have moved.
  void settle() {
    const nb::object moved = (*replica_).attr("settle")();
    if (!moved.is_none()) buffers_ = tensors_of("buffer", moved);
  }

  ObjectReference replica_;
  RunnerSide runner_;
  std::vector<Tensor> buffers_;  ///< In the order of the manifest.
};

/// A list of Places to read, and one to write.
using SharedPlace = nb::typed<nb::tuple, Memory, nb::str, NumberTuple>;
using SharedPlaces = nb::typed<nb::tuple, nb::typed<nb::list, SharedPlace>, nb::typed<nb::list, SharedPlace>>;

std::vector<std::pair<std::int64_t, std::uint64_t>> shared(const RunnerSide& runner) {
  std::vector<std::pair<std::int64_t, std::uint64_t>> list;
  for (const auto& entry : runner.binding->manifest.tensors)
    list.emplace_back(entry.shares, entry.shared_offset);
  return list;
}

/// In the order of the enumerators.
constexpr std::array<const char*, 3> autocast_names = {"off", "bf16", "fp16"};

/// What accelmgr._runner.factories makes a replica from. `rank` is -1 for the replica that describes the
/// model to the manager, which computes nothing and needs no device.
struct ReplicaSettings {
  Config config;
  int rank;
};

void bind_settings(nb::module_& module) {
  using Self = const ReplicaSettings&;
  nb::class_<ReplicaSettings>(module, "ReplicaSettings", "What a replica is made from.")
      .def_prop_ro(
          "rank", [](Self self) { return self.rank; }, "-1: the replica only describes the model.")
      .def_prop_ro(
          "factory", [](Self self) { return self.config.model.factory; }, "model.factory.")
      .def_prop_ro(
          "options", [](Self self) { return self.config.model.options; }, "model.options.")
      .def_prop_ro("seed", [](Self self) { return self.config.seed_base; })
      .def_prop_ro("device", [](Self self) { return config::name_of(self.config.runners.device); })
      .def_prop_ro("threads", [](Self self) { return runner::compute_threads(self.config); })
      .def_prop_ro(
          "shares_cores", [](Self self) { return self.config.runners.threads == 0; },
          "Whether `threads` is this runner's share of the machine.")
      .def_prop_ro("deterministic", [](Self self) { return self.config.deterministic; })
      .def_prop_ro(
          "autocast",
          [](Self self) { return autocast_names.at(static_cast<std::size_t>(self.config.runners.autocast)); },
          "\"off\", \"bf16\" or \"fp16\".")
      .def_prop_ro(
          "records", [](Self self) { return self.config.runners.cuda_graph == CudaGraph::automatic; },
          "Whether steps are recorded as CUDA graphs.")
      .def_prop_ro("micro_batches", [](Self self) { return self.config.grad_accumulation_steps; })
      .def_prop_ro("oversubscribe", [](Self self) { return self.config.runners.oversubscribe; })
      .def_prop_ro(
          "step_timeout", [](Self self) { return self.config.step_timeout; }, "In seconds.");
}

void open(const Config& config, replica::Role role) {
  in_python<ModelError>([&] { factories().attr("open_cuda")(ReplicaSettings{config, role.rank}); });
}

std::unique_ptr<replica::Replica> make(const Config& config, replica::Role role) {
  return in_python<ModelError>([&] {
    nb::object made = factories().attr("make_replica")(ReplicaSettings{config, role.rank});
    return std::make_unique<PythonReplica>(std::move(made), config.loss_scaling.field);
  });
}

/// The program accelmgr manages built-in models; a process with an interpreter cannot.
std::unique_ptr<replica::Replica> make_built_in(const Config& config, replica::Role) {
  throw ConfigError(
      fmt::format("model.kind '{}' is computed by libtorch in C++, which this Python package does not have; "
                  "pass a torch.nn.Module, or train it with `accelmgr train`",
                  config.model.kind),
      "model.kind");
}

}  // namespace

void register_replicas() {
  replica::register_factory(kind, make, open);
  replica::register_factory("", make_built_in);
}

void bind_replica(nb::module_& module) {
  bind_settings(module);
  nb::class_<RunnerSide>(
      module, "RunnerSide",
      "What a runner is to its replica: takes gradients, gives parameters, says how far the attempt is.")
      .def("capture", &RunnerSide::capture, nb::arg("index"), nb::arg("address"),
           "Copies the dense gradient of parameter `index` at `address` into the slab.")
      .def("capture_unlocked", &RunnerSide::capture, nb::arg("index"), nb::arg("address"),
           nb::call_guard<Unlocked>(),
           "As capture(), while other threads of Python run. The caller keeps the gradient alive.")
      .def_prop_ro("shared", &shared,
                   "Of each parameter: the one whose memory it shares, or -1; and from which element on.")
      .def_ro("loss_weight", &RunnerSide::loss_weight,
              "The number that each output must have (`loss_scaling: sum_over`), or empty.")
      .def("is_stale", &RunnerSide::is_stale, nb::arg("index"),
           "Whether load_parameters() is to bring the parameter again: not one that is frozen and was not "
           "written.")
      .def(
          "magnitude", &RunnerSide::magnitude, nb::arg("index"), nb::arg("largest"),
          "The largest magnitude of the gradient of parameter `index`, which a device has copied: Inf or NaN "
          "if a value of it is.")
      .def("backward_begins", &RunnerSide::backward_begins)
      .def("keeps_gradients", &RunnerSide::keeps_gradients,
           "Whether the replica keeps the gradients of this attempt for apply(), and gives none to the "
           "runner.")
      .def("look_at", &RunnerSide::look_at, nb::arg("index"), nb::arg("address"),
           "Looks at such a gradient of parameter `index`, which is dense, at `address`: whether it is "
           "finite.")
      .def(
          "share",
          [](RunnerSide& self, int memory) -> SharedPlaces {
            const auto found = self.share(memory);
            const auto places = [&](const std::vector<replica::Place>& of) {
              return list_of(self.binding->manifest, of, &session::TensorEntry::dtype);
            };
            return SharedPlaces(nb::make_tuple(places(found.read), places(found.write)));
          },
          nb::arg("memory"),
          "Maps the parameters that all ranks share; closes `memory`, the descriptor of the host's file. "
          "Returns "
          "where each is to be read, and where it is to be written; nothing if they are not guarded.")
      .def("last_micro_batch", &RunnerSide::last_micro_batch,
           "Whether no micro-batch follows the one that runs now. False: perhaps one follows.")
      .def(
          "warn", [](RunnerSide&, const std::string& text) { base::log().warn("{}", text); }, nb::arg("text"),
          "Logs a warning.")
      .def("wanted", &RunnerSide::wanted,
           "A sign of life, of a replica that waits for a device. False: it should leave its work "
           "unfinished.");
}

}  // namespace accelmgr::python
