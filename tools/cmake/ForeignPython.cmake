# In place of find_package(Python): the Python that a wheel is for, where it does not run here (tools/wheel --for).
#
#   ACCELMGR_FOREIGN_PYTHON    its version, as 3.11; from 3.12 on the module serves every newer one too
#   ACCELMGR_FOREIGN_HEADERS   the folders of its headers
include_guard()

set(Python_VERSION ${ACCELMGR_FOREIGN_PYTHON})
set(Python_INTERPRETER_ID Python)
set(Python_INCLUDE_DIRS ${ACCELMGR_FOREIGN_HEADERS})
add_executable(Python::Interpreter IMPORTED)
set_target_properties(Python::Interpreter PROPERTIES IMPORTED_LOCATION ${Python_EXECUTABLE})
add_library(Python::Module INTERFACE IMPORTED)
if(Python_VERSION VERSION_GREATER_EQUAL 3.12)
  add_library(Python::SABIModule INTERFACE IMPORTED)  # What nanobind looks at.
  # nanobind 3.1 takes it from Python.h, which does not include it in a module for several versions.
  add_compile_options("SHELL:-include cstdio")
endif()
# scikit-build-core knows those of the Python that runs it.
string(REPLACE "." "" _digits ${Python_VERSION})
set(SKBUILD_SOABI cpython-${_digits}-${CMAKE_SYSTEM_PROCESSOR}-linux-gnu)
set(SKBUILD_SOSABI abi3)
