# _native_stable: the extension module of the Python package for Python 3.12 and all newer ones, by their stable ABI. The
# module of the package itself is for one version of Python. Needs the headers of any Python from 3.12 on:
#
#   ACCELMGR_STABLE_PYTHON   (cache) that Python; looked for in PATH and among pyenv's versions
include_guard()

file(GLOB _versions $ENV{HOME}/.pyenv/versions/3.1[2-9]*/bin)
find_program(ACCELMGR_STABLE_PYTHON NAMES python3.12 python3.13 python3.14 HINTS ${_versions}
             DOC "A Python from 3.12 on, with headers, for the module that serves all of them")
set(_headers)
if(ACCELMGR_STABLE_PYTHON)
  execute_process(
    COMMAND ${ACCELMGR_STABLE_PYTHON} -c
      "import sys, sysconfig; print(sysconfig.get_path('include') if sys.version_info >= (3, 12) else '', end='')"
    OUTPUT_VARIABLE _headers ERROR_QUIET)
endif()
if(NOT EXISTS ${_headers}/Python.h)
  return()
endif()

set(Python_INCLUDE_DIRS ${_headers})  # nanobind_build_library() reads it.
nanobind_build_library(nanobind-static-abi3 AS_SYSINCLUDE)
target_compile_definitions(nanobind-static-abi3 PUBLIC Py_LIMITED_API=0x030C0000)
get_target_property(_sources _native SOURCES)
list(FILTER _sources INCLUDE REGEX "^[a-z_]+(/[a-z_]+)?[.]cpp$")
list(TRANSFORM _sources PREPEND ${PROJECT_SOURCE_DIR}/src/python/)
add_library(_native_stable MODULE EXCLUDE_FROM_ALL ${_sources})
target_link_libraries(_native_stable PRIVATE nanobind-static-abi3 accelmgr_flags)
get_target_property(_floors _native LINK_LIBRARIES)
list(FILTER _floors INCLUDE REGEX "^accelmgr_")
target_link_libraries(_native_stable PRIVATE ${_floors})
target_compile_definitions(_native_stable PRIVATE ACCELMGR_VERSION="${PROJECT_VERSION}")
nanobind_set_visibility(_native_stable)
set_target_properties(_native_stable PROPERTIES PREFIX "" OUTPUT_NAME _native SUFFIX .abi3.so
                      LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/stable)
