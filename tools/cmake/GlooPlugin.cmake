# The plug-in that holds gloo (Debian's libgloo-dev), libaccelmgr_gloo.so: a library of its own that nothing links, loaded
# when several hosts are asked for. Without gloo, and under sanitizers, whose runtime cannot be loaded beside
# RTLD_DEEPBIND, it is left out, and the library says why.
#
#   accelmgr_gloo           the plug-in, if there is one
#   ACCELMGR_GLOO_DEFINES   for what looks for it
include_guard()
include(GNUInstallDirs)

set(_libdir ${CMAKE_INSTALL_LIBDIR}/accelmgr)
set(ACCELMGR_GLOO_DEFINES)
if(NOT ACCELMGR_WHEEL)  # In a wheel it lies beside the extension module, which is where it is looked for first.
  set(ACCELMGR_GLOO_DEFINES ACCELMGR_GLOO_LIBDIR="${_libdir}" ACCELMGR_GLOO_PREFIX="${CMAKE_INSTALL_PREFIX}")
endif()

find_package(Gloo 0.5 QUIET)
if(ACCELMGR_SANITIZE)
  set(_reason "this is a build with sanitizers")
elseif(NOT Gloo_FOUND)
  set(_reason "gloo (libgloo-dev) was not found")
else()
  set(_reason)
endif()

if(_reason)
  message(STATUS "No gloo plug-in: ${_reason}")
  list(APPEND ACCELMGR_GLOO_DEFINES ACCELMGR_GLOO_NOT_BUILT="${_reason}")
  return()
endif()

add_library(accelmgr_gloo MODULE ${PROJECT_SOURCE_DIR}/src/launcher/collective/gloo/plugin.cpp)
set_target_properties(accelmgr_gloo PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
target_include_directories(accelmgr_gloo PRIVATE ${PROJECT_SOURCE_DIR}/src)
target_compile_options(accelmgr_gloo PRIVATE "SHELL:-idirafter ${PROJECT_SOURCE_DIR}/src/launcher/collective/gloo/missing")
target_compile_features(accelmgr_gloo PRIVATE cxx_std_20)
target_link_libraries(accelmgr_gloo PRIVATE accelmgr_flags gloo Threads::Threads)
if(ACCELMGR_WHEEL)
  return()
endif()
install(TARGETS accelmgr_gloo LIBRARY DESTINATION ${_libdir})
