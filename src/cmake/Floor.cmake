# How a floor, a program and a test of accelmgr are declared: one set of warnings and flags for all of our code.
include_guard()
include(CheckCXXCompilerFlag)

find_program(ACCELMGR_CCACHE ccache)
if(ACCELMGR_CCACHE)
  # Paths below the checkout count as relative ones: another clone finds what this one has compiled.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1
                                  ${ACCELMGR_CCACHE})
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

# -O2 compiles in a fifth less time than -O3, which the loops over tensors ask for by themselves (Kernels.cmake).
string(REPLACE "-O3" "-O2" CMAKE_CXX_FLAGS_RELEASE "${CMAKE_CXX_FLAGS_RELEASE}")

# What is summed in two places must round the same way in both: no contraction into fused multiply-add.
add_library(accelmgr_flags INTERFACE)
# -Wrestrict of g++ 12 finds overlaps in std::string's operator+ that are none (GCC bug 105329).
target_compile_options(accelmgr_flags INTERFACE -Wall -Wextra -Wpedantic -Werror
                       $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict> -ffp-contract=off)
if(CMAKE_UNITY_BUILD)
  # A class of a source that a unity build includes is taken for one of a header, which may have no part of one source alone.
  target_compile_options(accelmgr_flags INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
endif()
if(ACCELMGR_SANITIZE)
  add_compile_options(-fsanitize=${ACCELMGR_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${ACCELMGR_SANITIZE})
  # The check of virtual tables probes memory through a pipe, and reports what it cannot probe: all, in a test that has
  # used up its descriptors.
  if(ACCELMGR_SANITIZE MATCHES undefined)
    add_compile_options(-fno-sanitize=vptr)
  endif()
  # g++ defines these itself; clang 14 does not.
  if(CMAKE_CXX_COMPILER_ID STREQUAL Clang)
    if(ACCELMGR_SANITIZE MATCHES address)
      add_compile_definitions(__SANITIZE_ADDRESS__=1)
    endif()
    if(ACCELMGR_SANITIZE MATCHES thread)
      add_compile_definitions(__SANITIZE_THREAD__=1)
    endif()
  endif()
  # The thread sanitizer does not know fences; Boost.Asio has them for handlers that change threads, and ours never do.
  if(ACCELMGR_SANITIZE MATCHES thread)
    add_compile_definitions(BOOST_ASIO_DISABLE_FENCED_BLOCK)
  endif()
endif()

# accelmgr_floor(NAME SOURCES file... [FLOORS floor...] [LIBRARIES target...] [TORCH])
#   FLOORS: the floors below that it uses. LIBRARIES: packages. TORCH: it includes torch's headers.
function(accelmgr_floor name)
  cmake_parse_arguments(arg "TORCH" "" "SOURCES;FLOORS;LIBRARIES" ${ARGN})
  set(target accelmgr_${name})
  add_library(${target} STATIC ${arg_SOURCES})
  add_library(accelmgr::${name} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
  target_include_directories(${target} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>
    $<INSTALL_INTERFACE:include>)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:accelmgr_flags>)
  foreach(floor IN LISTS arg_FLOORS)
    target_link_libraries(${target} PUBLIC accelmgr_${floor})
  endforeach()
  target_link_libraries(${target} PUBLIC ${arg_LIBRARIES})
  if(arg_TORCH)
    target_link_libraries(${target} PUBLIC LibTorch::cpu)
  endif()
  set_property(GLOBAL APPEND PROPERTY ACCELMGR_FLOOR_TARGETS ${target})
endfunction()

# accelmgr_use_floors(TARGET FLOORS floor...)
function(accelmgr_use_floors target)
  cmake_parse_arguments(arg "" "" "FLOORS" ${ARGN})
  foreach(floor IN LISTS arg_FLOORS)
    target_link_libraries(${target} PRIVATE accelmgr_${floor})
  endforeach()
endfunction()

# accelmgr_program(TARGET SOURCES file... FLOORS floor... [LIBRARIES target...])
function(accelmgr_program target)
  cmake_parse_arguments(arg "" "" "SOURCES;FLOORS;LIBRARIES" ${ARGN})
  add_executable(${target} ${arg_SOURCES})
  target_link_libraries(${target} PRIVATE accelmgr_flags ${arg_LIBRARIES})
  accelmgr_use_floors(${target} FLOORS ${arg_FLOORS})
endfunction()
