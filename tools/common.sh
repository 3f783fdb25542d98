# Shared by tools/setup, tools/run and tools/test, which source it.

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)

# An empty ACCELMGR_PYTHON is none. A relative one is made absolute, for CMake runs it from another directory; symbolic links
# stay, for a virtual environment is one.
if [[ -z ${ACCELMGR_PYTHON:-} ]]; then
  unset ACCELMGR_PYTHON
elif [[ $ACCELMGR_PYTHON == */* ]]; then
  ACCELMGR_PYTHON=$(realpath --no-symlinks --canonicalize-missing -- "$ACCELMGR_PYTHON")
  export ACCELMGR_PYTHON
fi

say() { printf '%s: %s\n' "tools/${0##*/}" "$*" >&2; }

fail() {
  say "$*"
  exit 1
}

# quietly COMMAND...: what it prints is shown on a terminal; elsewhere only if it fails.
quietly() {
  if [[ -t 2 ]]; then
    "$@" >&2
    return
  fi
  local log status=0
  log=$(mktemp)
  "$@" >"$log" 2>&1 </dev/null || status=$?
  if ((status != 0)); then
    cat -- "$log" >&2
    say "failed with exit code $status: $*"
  fi
  rm -f -- "$log"
  return "$status"
}

# build_preset PRESET [TARGET]: configures and builds it, all of it unless a target is named.
build_preset() {
  local preset=$1 target=${2:-all}
  say "building $target (preset $preset, in build/$preset)"
  quietly cmake -S "$root" --preset "$preset"
  quietly cmake --build "$root/build/$preset" --parallel "$(nproc)" --target "$target"
}
