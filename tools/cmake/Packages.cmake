# accelmgr_find_packages(PACKAGE...): finds each, "NAME" or "NAME VERSION", and says at once what to install for those that
# are not there.
include_guard()

# What Debian, Fedora and conda-forge call them.
set(_names_fmt libfmt-dev fmt-devel fmt)
set(_names_spdlog libspdlog-dev spdlog-devel spdlog)
set(_names_yaml-cpp libyaml-cpp-dev yaml-cpp-devel yaml-cpp)
set(_names_nlohmann_json nlohmann-json3-dev json-devel nlohmann_json)
set(_names_xxHash libxxhash-dev xxhash-devel xxhash)
set(_names_Boost libboost-dev boost-devel libboost-headers)
set(_names_CLI11 libcli11-dev cli11-devel cli11)

function(accelmgr_find_packages)
  foreach(package IN LISTS ARGN)
    separate_arguments(package)
    find_package(${package} QUIET)
    list(GET package 0 name)
    if(NOT ${name}_FOUND)
      list(JOIN package " " text)
      list(APPEND missing ${text})
      list(GET _names_${name} 0 1 2 names)
      foreach(system IN ITEMS debian fedora conda)
        list(POP_FRONT names next)
        string(APPEND ${system} " ${next}")
      endforeach()
    endif()
  endforeach()
  if(missing)
    list(JOIN missing ", " missing)
    # Lines that begin with a space are not wrapped.
    message(FATAL_ERROR " Not found: ${missing}\n Debian: apt-get install${debian}\n Fedora: dnf install${fedora}\n"
                        " conda:  conda install -c conda-forge${conda}")
  endif()
endfunction()
