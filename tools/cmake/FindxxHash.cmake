# Finds the headers of xxHash (Debian's libxxhash-dev), which has no CMake package there. The headers alone: they are used
# with XXH_INLINE_ALL, so nothing is linked, and who links accelmgr needs no xxHash.
#
#   xxHash::headers
find_path(xxHash_INCLUDE_DIR xxhash.h)
if(xxHash_INCLUDE_DIR)
  file(STRINGS ${xxHash_INCLUDE_DIR}/xxhash.h _lines REGEX "^#define XXH_VERSION_(MAJOR|MINOR|RELEASE) +[0-9]+")
  list(TRANSFORM _lines REPLACE ".* ([0-9]+).*" "\\1")
  list(JOIN _lines "." xxHash_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(xxHash REQUIRED_VARS xxHash_INCLUDE_DIR VERSION_VAR xxHash_VERSION)

if(xxHash_FOUND AND NOT TARGET xxHash::headers)
  add_library(xxHash::headers INTERFACE IMPORTED)
  target_include_directories(xxHash::headers INTERFACE ${xxHash_INCLUDE_DIR})
endif()
mark_as_advanced(xxHash_INCLUDE_DIR)
