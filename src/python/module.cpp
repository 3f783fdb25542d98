// The extension module accelmgr._native. Users see the Python package above it.
#include "python/interpreter.hpp"

NB_MODULE(_native, module) {
  nanobind::set_leak_warnings(false);  // Processes that _exit() do not free objects of Python.
  module.attr("VERSION") = ACCELMGR_VERSION;
  accelmgr::python::bind_errors(module);
  accelmgr::python::bind_roles(module);
  accelmgr::python::bind_results(module);
  accelmgr::python::bind_memory(module);
  accelmgr::python::bind_replica(module);
  accelmgr::python::bind_device(module);
  accelmgr::python::bind_records(module);
  accelmgr::python::bind_observer(module);
  accelmgr::python::bind_manager(module);
  accelmgr::python::bind_snapshot(module);
  accelmgr::python::bind_launch(module);
  accelmgr::python::bind_distributed(module);
}
