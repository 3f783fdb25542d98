# shellcheck shell=bash
# Functions of tools/setup, tools/run, tools/test, tools/gpu and tools/wheel, which source this file.

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)

# An empty ACCELMGR_PYTHON counts as unset. A relative path becomes absolute, because CMake runs it in another directory.
# Symbolic links stay: the python of a virtual environment is one.
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

# quietly COMMAND...: runs a command. On a terminal its output is shown. Elsewhere its latest line is shown every 15 seconds
# as progress, and all its output if it fails.
quietly() {
  if [[ -t 2 ]]; then
    "$@" >&2
    return
  fi
  local log status=0
  log=$(mktemp)
  "$@" 2>&1 </dev/null | show_progress "$log" || status=$?
  if ((status != 0)); then
    cat -- "$log" >&2
    say "failed with exit code $status: $*"
  fi
  rm -f -- "$log"
  return "$status"
}

# show_progress FILE: copies standard input into the file, and shows a line every 15 seconds.
show_progress() {
  local line shown=$SECONDS
  while IFS= read -r line || [[ -n $line ]]; do
    printf '%s\n' "$line"
    if ((SECONDS - shown >= 15)); then
      shown=$SECONDS
      say "${line:0:120}"
    fi
  done >"$1"
}

# build_preset PRESET [TARGET...]: configures and builds it. Without targets: programs, tests and the Python package.
build_preset() {
  local preset=$1 targets=("${@:2}") begin=$SECONDS
  ((${#targets[@]} > 0)) || targets=(all)
  say "building ${targets[*]} (preset $preset, in build/$preset)"
  quietly cmake -S "$root" --preset "$preset"
  quietly cmake --build "$root/build/$preset" --parallel "$(nproc)" --target "${targets[@]}"
  say "built in $((SECONDS - begin)) s"
}
