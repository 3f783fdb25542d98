# What CMake adds to the wheel, for which scikit-build-core installs the component `python` into the package: the extension
# module with its stub. The target `wheel` builds it. It does not link libtorch: the wheel meets whatever torch is beside it.
# The program `accelmgr` links libtorch and is not in the wheel; the command of that name is the package's (__main__.py).
include_guard()

install(TARGETS _native LIBRARY DESTINATION accelmgr COMPONENT python)
install(FILES ${PROJECT_BINARY_DIR}/python/accelmgr/_native.pyi DESTINATION accelmgr COMPONENT python)
# auditwheel adds the libraries that these link (tools/wheel); their licences ask for a notice. Debian keeps each in its package.
foreach(library IN ITEMS libfmt libspdlog libyaml-cpp)
  file(GLOB _notices /usr/share/doc/${library}[-0-9]*/copyright)
  if(_notices)
    list(GET _notices 0 _notice)
    install(FILES ${_notice} DESTINATION accelmgr/licenses RENAME ${library}.txt COMPONENT python)
  endif()
endforeach()
add_custom_target(wheel DEPENDS _native)
