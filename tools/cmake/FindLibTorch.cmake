# Finds libtorch in the wheel of a Python, or where a torch is already, without torch's own CMake package: that one insists
# on a CUDA toolkit and links libtorch_cuda (a process then takes 1.0 s to start instead of 0.37 s).
#
#   ACCELMGR_PYTHON   (variable or environment) the Python whose torch is used; default: .venv of the checkout
#   LibTorch_ROOT     a folder with torch's `include` and `lib`, instead: of an unpacked libtorch, for instance. After
#                     find_package(Torch) it is that one.
#   LibTorch::cpu     libtorch_cpu and libc10
#   LibTorch::python  the same and libtorch_python; only where it is
#   LibTorch::cuda    the same and libtorch_cuda, libc10_cuda; only where nvcc is
#   LibTorch_VERSION
#
# The headers come with -idirafter: the wheel ships another fmt, which must not shadow the system's.
if(NOT ACCELMGR_PYTHON)
  if(DEFINED ENV{ACCELMGR_PYTHON})
    set(ACCELMGR_PYTHON $ENV{ACCELMGR_PYTHON})
  else()
    set(ACCELMGR_PYTHON ${PROJECT_SOURCE_DIR}/.venv/bin/python)
  endif()
endif()

if(NOT LibTorch_ROOT AND TORCH_INSTALL_PREFIX)  # Of find_package(Torch).
  set(LibTorch_ROOT ${TORCH_INSTALL_PREFIX})
endif()
if(NOT LibTorch_ROOT)
  execute_process(
    COMMAND ${ACCELMGR_PYTHON} -c
      "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0], end='')"
    OUTPUT_VARIABLE LibTorch_ROOT RESULT_VARIABLE _failed ERROR_QUIET)
  if(_failed)
    set(LibTorch_ROOT "")
  endif()
endif()

set(LibTorch_VERSION "")
foreach(_header IN ITEMS torch/headeronly/version.h torch/csrc/api/include/torch/version.h)  # Since 2.9; before.
  if(NOT LibTorch_VERSION AND LibTorch_ROOT AND EXISTS ${LibTorch_ROOT}/include/${_header})
    file(STRINGS ${LibTorch_ROOT}/include/${_header} _lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
    string(REGEX REPLACE "[^0-9;]" "" LibTorch_VERSION "${_lines}")
    list(JOIN LibTorch_VERSION . LibTorch_VERSION)
  endif()
endforeach()
find_library(LibTorch_CPU_LIBRARY torch_cpu PATHS ${LibTorch_ROOT}/lib NO_DEFAULT_PATH NO_CACHE)
find_library(LibTorch_C10_LIBRARY c10 PATHS ${LibTorch_ROOT}/lib NO_DEFAULT_PATH NO_CACHE)


set(_advice "Run tools/setup, or set ACCELMGR_PYTHON to a Python that has torch ${LibTorch_FIND_VERSION}")
set(_found "found '${LibTorch_VERSION}' through ${ACCELMGR_PYTHON}")
if(LibTorch_C10_LIBRARY)
  # Wheels before 2.7 have another std::string than Debian's libraries; their constructor of c10::Error names it.
  file(STRINGS ${LibTorch_C10_LIBRARY} LibTorch_ABI REGEX "c105ErrorC1ENS_14SourceLocationENSt7__cxx11" LIMIT_COUNT 1)
  if(NOT LibTorch_ABI)
    string(APPEND _found ", which was built with the C++ ABI before that of C++11")
  endif()
endif()
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibTorch
  REQUIRED_VARS LibTorch_ROOT LibTorch_CPU_LIBRARY LibTorch_C10_LIBRARY LibTorch_ABI
  VERSION_VAR LibTorch_VERSION
  REASON_FAILURE_MESSAGE "accelmgr needs torch ${LibTorch_FIND_VERSION}, ${_found}. ${_advice}")

if(LibTorch_FOUND AND NOT TARGET LibTorch::cpu)
  add_library(LibTorch::c10 SHARED IMPORTED)
  set_target_properties(LibTorch::c10 PROPERTIES IMPORTED_LOCATION ${LibTorch_C10_LIBRARY})
  add_library(LibTorch::torch_cpu SHARED IMPORTED)
  set_target_properties(LibTorch::torch_cpu PROPERTIES IMPORTED_LOCATION ${LibTorch_CPU_LIBRARY})
  add_library(LibTorch::cpu INTERFACE IMPORTED)
  target_link_libraries(LibTorch::cpu INTERFACE LibTorch::torch_cpu LibTorch::c10)
  target_compile_options(LibTorch::cpu INTERFACE
    "SHELL:-idirafter ${LibTorch_ROOT}/include"
    "SHELL:-idirafter ${LibTorch_ROOT}/include/torch/csrc/api/include")
  target_compile_definitions(LibTorch::cpu INTERFACE AT_PER_OPERATOR_HEADERS)
  # libtorch_cpu of this wheel needs libcudart and libcupti, which its own run path finds; the linker need not.
  target_link_options(LibTorch::cpu INTERFACE -Wl,--allow-shlib-undefined)
  find_library(LibTorch_PYTHON_LIBRARY torch_python PATHS ${LibTorch_ROOT}/lib NO_DEFAULT_PATH NO_CACHE)
  if(LibTorch_PYTHON_LIBRARY)
    add_library(LibTorch::torch_python SHARED IMPORTED)
    set_target_properties(LibTorch::torch_python PROPERTIES IMPORTED_LOCATION ${LibTorch_PYTHON_LIBRARY})
    add_library(LibTorch::python INTERFACE IMPORTED)
    target_link_libraries(LibTorch::python INTERFACE LibTorch::cpu LibTorch::torch_python)
  endif()
  find_program(ACCELMGR_NVCC nvcc HINTS /usr/local/cuda/bin)
  find_library(LibTorch_CUDA_LIBRARY torch_cuda PATHS ${LibTorch_ROOT}/lib NO_DEFAULT_PATH NO_CACHE)
  find_library(LibTorch_C10_CUDA_LIBRARY c10_cuda PATHS ${LibTorch_ROOT}/lib NO_DEFAULT_PATH NO_CACHE)
  if(ACCELMGR_NVCC AND LibTorch_CUDA_LIBRARY AND LibTorch_C10_CUDA_LIBRARY)
    cmake_path(GET ACCELMGR_NVCC PARENT_PATH _bin)
    cmake_path(GET _bin PARENT_PATH ACCELMGR_CUDA_ROOT)
    add_library(LibTorch::cuda INTERFACE IMPORTED)
    target_link_libraries(LibTorch::cuda INTERFACE LibTorch::cpu ${LibTorch_CUDA_LIBRARY} ${LibTorch_C10_CUDA_LIBRARY})
    target_compile_options(LibTorch::cuda INTERFACE "SHELL:-idirafter ${ACCELMGR_CUDA_ROOT}/include")
  endif()
endif()
