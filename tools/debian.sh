# shellcheck shell=bash
# Functions that fetch packages of any Debian and for any processor, without root, into build/debian. Who sources this file has
# sourced common.sh.
# shellcheck disable=SC2154 # common.sh sets `root`.

debian_cache=$root/build/debian

# debian_lists SUITE ARCHITECTURE: sets `apt_options`, with which apt knows Debian's packages alone, by lists of its own. Those of
# this machine stay as they are.
debian_lists() {
  local state=$debian_cache/apt-$1-$2 mirror
  apt_options=(--quiet -o "Dir::State::Lists=$state/lists" -o Dir::State::status=/dev/null -o "Dir::Cache=$state/cache"
    -o "Dir::Etc::SourceList=$state/sources.list" -o Dir::Etc::SourceParts=/dev/null -o APT::Sandbox::User=root
    -o "APT::Architecture=$2" -o "APT::Architectures=$2")
  [[ ! -f $state/ready ]] || return 0
  # shellcheck disable=SC2016 # apt expands this.
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Component: main' | head -n 1)
  [[ -n $mirror ]] || fail "apt knows no mirror of Debian, which has the libraries and headers"
  mkdir -p "$state/lists/partial" "$state/cache/archives/partial"
  printf '%s %s %s main\n' deb "$mirror" "$1" deb-src "$mirror" "$1" >"$state/sources.list"
  quietly apt-get "${apt_options[@]}" update
  touch "$state/ready"
}

# debian SUITE ARCHITECTURE COMMAND...: apt-get, with these lists.
debian() {
  local apt_options
  debian_lists "$1" "$2"
  quietly apt-get "${apt_options[@]}" "${@:3}"
}

# unpacked SUITE ARCHITECTURE PACKAGE: fetches a package, and prints the folder of its files.
unpacked() {
  local folder=$debian_cache/$1-$2-$3
  if [[ ! -d $folder ]]; then
    rm -rf -- "$folder.new"
    mkdir -p "$folder.new"
    (cd -- "$folder.new" && debian "$1" "$2" download "$3" && dpkg-deb --extract "$3"_*.deb . && rm -- "$3"_*.deb) || return 1
    mv -- "$folder.new" "$folder"
  fi
  printf '%s\n' "$folder"
}
