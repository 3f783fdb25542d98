// Updates that the session makes, and the moments that it keeps for them.
#include "python/manager/handle.hpp"

namespace nb = nanobind;

namespace accelmgr::python {

std::pair<Handle::Moments, Handle::Moments> Handle::moments() const {
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

std::vector<std::uint64_t> Handle::updates() {
  std::vector<std::uint64_t> counts;
  for (std::size_t i = 0; i < manifest_.tensors.size(); ++i) counts.push_back(started().updates(i));
  return counts;
}

void bind_moments(HandleClass& type) {
  type.def("moments", &Handle::moments,
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
          "How many moments the last optimizer has used.");
}

}  // namespace accelmgr::python
