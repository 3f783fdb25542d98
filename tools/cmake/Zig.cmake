# The toolchain of `tools/wheel --for`: clang and libc++ as PyPI's ziglang has them, for Linux with an older C library than
# this machine's, or for another processor. tools/zig.sh fills the folder ACCELMGR_ZIG with the tools and the libraries;
# nothing else of this machine is seen.
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES ACCELMGR_ZIG CMAKE_SYSTEM_PROCESSOR)
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_C_COMPILER ${ACCELMGR_ZIG}/bin/cc)
set(CMAKE_CXX_COMPILER ${ACCELMGR_ZIG}/bin/c++)
set(CMAKE_AR ${ACCELMGR_ZIG}/bin/ar)
set(CMAKE_RANLIB ${ACCELMGR_ZIG}/bin/ranlib)

set(CMAKE_FIND_ROOT_PATH ${ACCELMGR_ZIG})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(CMAKE_PREFIX_PATH ${ACCELMGR_ZIG})

# The unwinder is libgcc_s, which every Linux with Python and torch has, and not the one that zig would build in:
# pthread_exit(), with which Python ends its threads, unwinds by libgcc_s through our frames, and one unwinder cannot read
# the other's state.
set(CMAKE_MODULE_LINKER_FLAGS_INIT ${ACCELMGR_ZIG}/lib/libgcc_s.so.1)
