// The tensors of a session: parameters, gradients and buffers.
#include "python/manager/handle.hpp"

#include <nanobind/stl/string_view.h>

#include <cstring>

#include "base/ipc/memory.hpp"
#include "base/unique_fd.hpp"
#include "engine/replica/model.hpp"
#include "python/content.hpp"

namespace nb = nanobind;

namespace accelmgr::python {

std::vector<Place> Handle::parameters() const {
  return session_ ? parameters_in(view_->parameters(), session_) : std::vector<Place>{};
}

std::pair<int, std::vector<Place>> Handle::shared_parameters() const {
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

std::vector<std::optional<Place>> Handle::gradients() const {
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

std::vector<std::pair<std::string, std::vector<std::string>>> Handle::persistent_buffers() const {
  std::vector<std::pair<std::string, std::vector<std::string>>> found;
  for (const auto& entry : manifest_.buffers)
    if (entry.persistent) found.emplace_back(entry.name, entry.aliases);
  return found;
}

nb::typed<nb::list, BufferValue> Handle::buffers() {
  nb::list list;
  for (const auto& [name, dtype, shape, data] : started().buffers())
    list.append(nb::make_tuple(name, nb::str(name_of(dtype).data()), tuple_of(shape),
                               nb::bytearray(data, dense_bytes(dtype, shape))));
  return list;
}

std::vector<std::pair<std::string, NumberTuple>> Handle::buffer_shapes() const {
  std::vector<std::pair<std::string, NumberTuple>> shapes;
  for (const auto& entry : manifest_.buffers) shapes.emplace_back(entry.name, tuple_of(entry.shape));
  return shapes;
}

void Handle::copy_buffers(const std::vector<std::uintptr_t>& to) const {
  const auto* committed = session_->result_buffers(session_->word().index);
  for (std::size_t i = 0; i < to.size(); ++i) {
    const auto& entry = manifest_.buffers.at(i);
    auto* const buffer = reinterpret_cast<std::byte*>(to[i]);
    if (buffer != nullptr && std::memcmp(buffer, committed + entry.offset, entry.bytes) != 0)
      std::memcpy(buffer, committed + entry.offset, entry.bytes);
  }
}

std::vector<std::size_t> Handle::differing_buffers(const std::vector<std::uintptr_t>& at) const {
  const auto* committed = session_->result_buffers(session_->word().index);
  std::vector<std::size_t> numbers;
  for (std::size_t i = 0; i < at.size(); ++i) {
    const auto& entry = manifest_.buffers.at(i);
    const auto* const buffer = reinterpret_cast<const std::byte*>(at[i]);
    if (buffer != nullptr &&
        !is_alike({buffer, entry.bytes}, {committed + entry.offset, entry.bytes}, usual_pieces))
      numbers.push_back(i);
  }
  return numbers;
}

std::vector<Place> Handle::parameters_in(std::byte* memory, const std::shared_ptr<const void>& owner) const {
  std::vector<Place> places;
  const auto values = replica::places_of(memory, manifest_);
  for (std::size_t i = 0; i < values.size(); ++i)
    places.push_back(
        place_of(manifest_.tensors[i], manifest_.tensors[i].dtype, values[i].data, values[i].strides, owner));
  return places;
}

void bind_tensors(HandleClass& type) {
  type.def("zero_grad", [](Handle& self) { unlocked([&m = self.started()] { m.zero_grad(); }); })
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
           "The numbers of those that have other bytes at these addresses; 0: not this one. Of more "
           "than 64 KiB a sample is compared; see digest().")
      .def(
          "update_buffers",
          [](Handle& self, const std::vector<Addressed>& tensors) {
            const auto values = values_of<ModelError>(tensors);
            unlocked([&, &m = self.started()] { m.update_buffers(values); });
          },
          nb::arg("values"), "Raises ModelError before anything is written.");
}

}  // namespace accelmgr::python
