# shellcheck shell=bash
# Functions of `tools/wheel --for`, which sources this file after common.sh: compiler, libraries and headers that build the
# extension module for Linux with an older C library, or for another processor. All lies in build/zig, and stays there.
# shellcheck disable=SC2154 # tools/wheel sets `own_python`, and common.sh `root`.
. "$root/tools/debian.sh"

zig_cache=$root/build/zig

# prepare_zig PLATFORM PYTHON: makes all that is needed. Sets `version` to Python's, as it is in the wheel's tag, and
# `settings` to those of scikit-build-core. PYTHON is a program or a version.
prepare_zig() {
  local architecture=${1#manylinux_2_28_} headers='' tag stub
  zig_target=$architecture-linux-gnu.2.28
  zig_folder=$zig_cache/$zig_target
  debian_architecture=${architecture/x86_64/amd64}
  debian_architecture=${debian_architecture/aarch64/arm64}

  version=$2
  if [[ ! $version =~ ^3[.][0-9]+$ ]]; then
    command -v -- "$2" >/dev/null || fail "$2 is neither a program nor a version, as 3.11"
    version=$("$2" -c 'import sys; print("3.%d" % min(sys.version_info[1], 12))')
    # They serve another processor too: what pyconfig.h says of aarch64 and of x86-64 differs in nothing that a module uses.
    headers=$("$2" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  fi
  case $version in
    3.11) headers=$(python_headers bookworm 3.11) ;;
    3.12) headers=$(python_headers trixie 3.13) ;; # Debian has none of 3.12. A module for several has what these share.
    *) [[ -f $headers/pyconfig.h ]] ||
      fail "there are no headers of Python $version: name a program of it that has them (Debian has those of 3.11 and newer)" ;;
  esac

  zig_tools
  zig_libraries "$architecture"
  tag=cp${version/./}
  settings=("build-dir=$zig_folder/$tag" "wheel.tags=$tag-$([[ $version == 3.12 ]] && echo abi3 || echo "$tag")-linux_$architecture"
    "cmake.define.CMAKE_TOOLCHAIN_FILE=$root/tools/cmake/Zig.cmake" "cmake.define.ACCELMGR_ZIG=$zig_folder"
    "cmake.define.CMAKE_SYSTEM_PROCESSOR=$architecture" "cmake.define.ACCELMGR_FOREIGN_PYTHON=$version"
    "cmake.define.ACCELMGR_FOREIGN_HEADERS=$headers")

  # The module's stub is made by importing it. Where this machine's Python cannot, that of its own module will do.
  local own
  own=$("$own_python" -c 'import sys; print("3.%d" % min(sys.version_info[1], 12))')
  if [[ $architecture != "$(uname -m)" || $version != "$own" ]]; then
    "$root/tools/wheel" --for "manylinux_2_28_$(uname -m)" "$own" >/dev/null
    stub=$zig_cache/$(uname -m)-linux-gnu.2.28/cp${own/./}/python/accelmgr/_native.pyi
    settings+=("cmake.define.ACCELMGR_STUB=$stub")
  fi
}

# python_headers SUITE VERSION: prints the folders of Python's headers, as a list of CMake.
python_headers() {
  local files
  files=$(unpacked "$1" "$debian_architecture" "libpython$2-dev") || return 1
  printf '%s\n' "$files/usr/include/python$2;$files/usr/include"
}

# Fetches ziglang, and writes its commands where tools/cmake/Zig.cmake looks for them. The version is fixed: warnings are errors.
zig_tools() {
  local tool zig=$zig_cache/python/ziglang/zig
  if [[ ! -x $zig ]]; then
    say "fetching ziglang from PyPI (101 MB)"
    quietly "$own_python" -m pip install --disable-pip-version-check --no-input --no-cache-dir --target="$zig_cache/python" \
      "ziglang==0.17.1"
  fi
  mkdir -p "$zig_folder/bin" "$zig_folder/include" "$zig_folder/lib"
  for tool in cc c++ ar ranlib; do
    printf '#!/bin/sh\nexport ZIG_GLOBAL_CACHE_DIR=%q\nexec %q %s "$@"\n' "$zig_cache/objects" "$zig" \
      "$tool$([[ $tool != c* ]] || printf ' -target %s' "$zig_target")" >"$zig_folder/bin/new"
    chmod +x "$zig_folder/bin/new"
    # One that has not changed keeps its time, by which the compiler cache knows it.
    cmp --quiet "$zig_folder/bin/new" "$zig_folder/bin/$tool" || cp -- "$zig_folder/bin/new" "$zig_folder/bin/$tool"
  done
}

# zig_libraries ARCHITECTURE: what the module is built with. Debian's libraries will not do, for they need this machine's C
# library and another C++ library. Where they are more than headers, their sources are compiled.
zig_libraries() {
  local suite source files sources
  suite=$(. /etc/os-release && printf '%s' "$VERSION_CODENAME")
  files=$(unpacked "$suite" "$debian_architecture" libgcc-s1) || return 1
  ln -sf "$(find "$files" -name libgcc_s.so.1)" "$zig_folder/lib/"
  # Links, for the compiler must see nothing else of /usr/include.
  ln -sfn /usr/include/boost "$zig_folder/include/boost"
  ln -sf /usr/include/xxhash.h "$zig_folder/include/"
  sources=$zig_cache/$suite-sources
  mkdir -p "$sources"
  for source in fmtlib spdlog yaml-cpp nlohmann-json3; do
    [[ ! -f $zig_folder/$source.ready ]] || continue
    say "building $source for $zig_target"
    compgen -G "$sources/$source-*/" >/dev/null ||
      (cd -- "$sources" && debian "$suite" "$(dpkg --print-architecture)" source "$source")
    quietly cmake -S "$sources/$source"-*/ -B "$zig_folder-$source" -G Ninja -DCMAKE_BUILD_TYPE=Release \
      -DCMAKE_TOOLCHAIN_FILE="$root/tools/cmake/Zig.cmake" -DACCELMGR_ZIG="$zig_folder" -DCMAKE_SYSTEM_PROCESSOR="$1" \
      -DCMAKE_INSTALL_PREFIX="$zig_folder" -DCMAKE_INSTALL_LIBDIR=lib -DCMAKE_POSITION_INDEPENDENT_CODE=ON \
      -DBUILD_SHARED_LIBS=OFF -DFMT_TEST=OFF -DFMT_DOC=OFF -DSPDLOG_FMT_EXTERNAL=ON -DSPDLOG_BUILD_EXAMPLE=OFF \
      -DYAML_CPP_BUILD_TOOLS=OFF -DYAML_CPP_BUILD_TESTS=OFF -DJSON_BuildTests=OFF
    quietly cmake --build "$zig_folder-$source" --target install
    touch "$zig_folder/$source.ready"
  done
}
