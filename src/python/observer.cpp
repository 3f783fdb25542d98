// accelmgr._native.Observer, and the places of parameters that it and a Handle give out.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "engine/client/observer.hpp"
#include "engine/replica/model.hpp"
#include "python/interpreter.hpp"
#include "python/place.hpp"

namespace nb = nanobind;

namespace accelmgr::python {
namespace {

/// Version, step, and the parameters in memory of their own.
using ParameterTuple = std::tuple<std::uint64_t, std::uint64_t, std::vector<Place>>;

ParameterTuple parameters_of(const client::Observer& observer, double timeout_s) {
  const auto copy = waiting([&] { return observer.parameters(timeout_s); });
  const auto& tensors = observer.manifest().tensors;
  auto places = replica::places_of(copy.values.get(), observer.manifest());
  std::vector<Place> values;
  for (std::size_t i = 0; i < places.size(); ++i)
    values.push_back(
        place_of(tensors[i], tensors[i].dtype, places[i].data, std::move(places[i].strides), copy.values));
  return {copy.version, copy.step, std::move(values)};
}

void bind_places(nb::module_& module) {
  nb::class_<Place>(module, "Place", "A parameter of the master, or the gradient of one.")
      .def_ro("name", &Place::name)
      .def_ro("aliases", &Place::aliases, "Further names of the same parameter.")
      .def_ro("dtype", &Place::dtype, "As torch names it: \"float32\".")
      .def_ro("persistent", &Place::persistent, "Whether it is part of checkpoints.")
      .def_prop_ro("shape", [](const Place& self) { return tuple_of(self.shape); })
      .def_prop_ro(
          "strides", [](const Place& self) { return tuple_of(self.strides); }, "Strides in elements.")
      .def_prop_ro(
          "memory", [](const Place& self) { return self.memory; },
          "The bytes from the first to the last element.");
}

}  // namespace

Place place_of(const session::TensorEntry& entry, DType dtype, std::byte* data,
               std::vector<std::int64_t> strides, std::shared_ptr<const void> owner) {
  const auto bytes = extent_of(entry.shape, strides) * size_of(dtype);
  return {entry.name,         entry.aliases,    std::string(name_of(dtype)),    entry.shape,
          std::move(strides), entry.persistent, {data, bytes, std::move(owner)}};
}

void bind_observer(nb::module_& module) {
  bind_places(module);
  nb::class_<client::Observer>(module, "Observer", "See accelmgr.Observer.")
      .def_static(
          "attach",
          [](const std::string& path, double timeout_s) {
            return waiting([&] { return client::Observer::attach(path, timeout_s); });
          },
          nb::arg("path"), nb::arg("timeout"))
      .def_prop_ro("has_ended", &client::Observer::has_ended)
      .def("statistics", &client::Observer::statistics)
      .def("last_step", &client::Observer::last_step)
      .def(
          "next_step",
          [](client::Observer& self, double timeout_s) {
            return waiting([&] { return self.next_step(timeout_s); });
          },
          nb::arg("timeout"))
      .def("parameters", parameters_of, nb::arg("timeout"),
           "Version, number of committed steps, and copies of the parameters.");
}

}  // namespace accelmgr::python
