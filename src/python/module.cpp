// The extension module accelmgr._native. What users see is the Python above it.
#include "python/interpreter.hpp"

NB_MODULE(_native, module) {
  nanobind::set_leak_warnings(false);  // Objects of Python outlive the interpreter in processes that _exit().
  accelmgr::python::bind_errors(module);
  accelmgr::python::bind_roles(module);
  accelmgr::python::bind_results(module);
  accelmgr::python::bind_manager(module);
  accelmgr::python::bind_launch(module);
  accelmgr::python::bind_distributed(module);
}
