// Writes to parameters in place.
#include "python/manager/handle.hpp"

namespace nb = nanobind;

namespace accelmgr::python {
namespace {

/// A context manager that calls begin_writing() and end_writing(). It is in C++, because a signal handler
/// could end one of Python after it has begun writing, but before it knows.
struct Writing {
  Handle& handle;
};

}  // namespace

void bind_writing(nb::module_& module, HandleClass& type) {
  nb::class_<Writing>(module, "Writing",
                      "Writes in place inside `with` are one update: see Handle.writing().")
      .def("__enter__", [](Writing& self) { self.handle.started().begin_writing(client::Written::all); })
      .def(
          "__exit__",
          [](Writing& self, nb::handle type, nb::handle, nb::handle) {
            self.handle.started().end_writing(type.is_none());
          },
          nb::arg("type").none(), nb::arg("error").none(), nb::arg("traceback").none());
  type.def(
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
      .def_prop_ro("is_writing", [](Handle& self) { return self.started().is_writing(); });
}

}  // namespace accelmgr::python
