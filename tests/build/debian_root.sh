# shellcheck shell=bash
# Functions of the tests that run in an empty Debian, which source this file. They need root, network and debootstrap.

checkout=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)

# make_roots SUITE PACKAGES NAME...: makes an empty Debian with these packages (a list with commas, may be empty) in the
# folder $roots/NAME for each name. The folder $roots goes when the script ends.
make_roots() {
  local suite=$1 packages=$2 name
  shift 2
  ((EUID == 0)) || { echo "only root may make a root of Debian"; return 1; }
  command -v debootstrap >/dev/null || { echo "debootstrap is missing: apt-get install debootstrap"; return 1; }
  local build=$checkout/build
  mkdir -p -- "$build"
  roots=$(mktemp -d -- "$build/debian_roots.XXXXXX")
  trap 'rm -rf --one-file-system -- "$roots"' EXIT
  echo "== an empty Debian: $suite"
  debootstrap --variant=minbase ${packages:+--include="$packages"} "$suite" "$roots/$1" >"$roots/log" 2>&1 ||
    { cat "$roots/log"; return 1; }
  cp -- /etc/resolv.conf /etc/hosts "$roots/$1/etc/"
  mkdir "$roots/$1/test"
  for name in "${@:2}"; do
    cp --archive -- "$roots/$1" "$roots/$name"
  done
}

# in_root NAME COMMAND...: runs it there, with the environment of a user who has just logged in. The certificates that this
# machine trusts come along: pip needs them behind a proxy that terminates TLS. pip keeps no second copy of what it has
# downloaded, which nobody would use, and what it unpacks lies in memory. READ_ONLY=FOLDER is seen as /site-packages.
in_root() {
  local root=$roots/$1 certificates=${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt}
  local environment=(HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 PIP_NO_CACHE_DIR=1)
  shift
  if [[ -e $certificates ]]; then
    cp -- "$certificates" "$root/test/certificates.pem"
    environment+=(PIP_CERT=/test/certificates.pem)
  fi
  # The mounts are in a namespace of their own, so they end with it.
  # shellcheck disable=SC2016 # The shell that is started expands these.
  unshare --mount --pid --fork --kill-child bash -euo pipefail -c '
    root=$1
    shift
    mount -t proc proc "$root/proc"
    mount -t tmpfs -o size=4g,mode=1777 tmpfs "$root/tmp"
    mount --rbind /dev "$root/dev"
    if [[ -n ${READ_ONLY:-} ]]; then
      mkdir -p "$root/site-packages"
      mount --rbind --options ro "$READ_ONLY" "$root/site-packages"
    fi
    exec chroot "$root" env -i "$@"' bash "$root" "${environment[@]}" "$@" </dev/null
}
