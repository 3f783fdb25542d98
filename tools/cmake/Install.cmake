# Installs the program, the public headers, the floors' libraries, and the CMake package by which others find them:
#
#   find_package(accelmgr CONFIG REQUIRED)
#   target_link_libraries(... PRIVATE accelmgr::accelmgr)
include_guard()

# The public headers need torch: the floors without it are no library of their own.
if(NOT ACCELMGR_TORCH)
  return()
endif()

include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

get_property(_floors GLOBAL PROPERTY ACCELMGR_FLOOR_TARGETS)
add_library(accelmgr_library INTERFACE)
add_library(accelmgr::accelmgr ALIAS accelmgr_library)
set_target_properties(accelmgr_library PROPERTIES EXPORT_NAME accelmgr)
target_link_libraries(accelmgr_library INTERFACE ${_floors})

set(_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/accelmgr)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/accelmgr TYPE INCLUDE FILES_MATCHING PATTERN "*.hpp")
install(TARGETS accelmgr_library ${_floors} EXPORT accelmgrTargets)
install(EXPORT accelmgrTargets NAMESPACE accelmgr:: DESTINATION ${_package_dir})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE TYPE DOC)

if(TARGET accelmgr)
  # Named, for INSTALL_RPATH_USE_LINK_PATH leaves out what lies in the source tree, as .venv does.
  set_target_properties(accelmgr PROPERTIES INSTALL_RPATH ${LibTorch_ROOT}/lib)
  install(TARGETS accelmgr)
  install(FILES ${PROJECT_SOURCE_DIR}/configs/gpt-licenses.yaml DESTINATION ${CMAKE_INSTALL_DATADIR}/accelmgr)
endif()

# The Python that has torch, by its full path: whoever uses the package may have another PATH.
execute_process(COMMAND ${ACCELMGR_PYTHON} -c "import sys; print(sys.executable, end='')"
                OUTPUT_VARIABLE ACCELMGR_BUILD_PYTHON COMMAND_ERROR_IS_FATAL ANY)
configure_package_config_file(
  ${CMAKE_CURRENT_LIST_DIR}/accelmgrConfig.cmake.in ${PROJECT_BINARY_DIR}/accelmgrConfig.cmake
  INSTALL_DESTINATION ${_package_dir} NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/accelmgrConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/accelmgrConfig.cmake ${PROJECT_BINARY_DIR}/accelmgrConfigVersion.cmake
              ${CMAKE_CURRENT_LIST_DIR}/FindLibTorch.cmake
        DESTINATION ${_package_dir})
