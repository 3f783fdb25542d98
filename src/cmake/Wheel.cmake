# What CMake adds to the wheel, for which scikit-build-core installs the component `python`: into the package, the extension
# module and the gloo plug-in; beside the environment's Python, the program, and below the environment's share/ its shipped
# configuration. The target `wheel` builds them.
#
#   ACCELMGR_SITE_PACKAGES   (set before the floors) from the folder above the program's
include_guard()

set(_targets _native accelmgr)
install(TARGETS _native LIBRARY DESTINATION accelmgr COMPONENT python)
if(TARGET accelmgr_gloo)
  list(APPEND _targets accelmgr_gloo)
  install(TARGETS accelmgr_gloo LIBRARY DESTINATION accelmgr COMPONENT python)
endif()

# torch beside the package; where it is not (the program among a user's own, torch the system's), that of the build.
set_target_properties(accelmgr PROPERTIES
  INSTALL_RPATH "$ORIGIN/../${ACCELMGR_SITE_PACKAGES}/torch/lib;${LibTorch_ROOT}/lib")
install(TARGETS accelmgr RUNTIME DESTINATION ${SKBUILD_SCRIPTS_DIR} COMPONENT python)
install(FILES ${PROJECT_SOURCE_DIR}/configs/gpt-licenses.yaml DESTINATION ${SKBUILD_DATA_DIR}/share/accelmgr
        COMPONENT python)

add_custom_target(wheel DEPENDS ${_targets})
