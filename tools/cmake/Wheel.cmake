# What CMake adds to the wheel, for which scikit-build-core installs the component `python` into the package: the extension
# module with its stub, and the gloo plug-in. The target `wheel` builds them. Neither links libtorch: the wheel meets whatever torch is beside
# it. The program `accelmgr` links libtorch and is not in the wheel; the command of that name is the package's (__main__.py).
include_guard()

set(_targets _native)
install(TARGETS _native LIBRARY DESTINATION accelmgr COMPONENT python)
install(FILES ${PROJECT_BINARY_DIR}/python/accelmgr/_native.pyi DESTINATION accelmgr COMPONENT python)
if(TARGET accelmgr_gloo)
  list(APPEND _targets accelmgr_gloo)
  install(TARGETS accelmgr_gloo LIBRARY DESTINATION accelmgr COMPONENT python)
endif()
# auditwheel adds the libraries that these link (tools/wheel); their licences ask for a notice. Debian keeps each in its package.
foreach(library IN ITEMS libfmt libspdlog libyaml-cpp libgloo libhiredis libibverbs libnl-3 libnl-route-3)
  file(GLOB _notices /usr/share/doc/${library}[-0-9]*/copyright)
  if(_notices)
    list(GET _notices 0 _notice)
    install(FILES ${_notice} DESTINATION accelmgr/licenses RENAME ${library}.txt COMPONENT python)
  endif()
endforeach()
add_custom_target(wheel DEPENDS ${_targets})
