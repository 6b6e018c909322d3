#!/bin/bash
# Installs what tandem needs on Debian 12 or 13. Safe to run again: what is there stays as it is.
#   scripts/setup.sh          compiler, CMake and libraries: enough to build
#   scripts/setup.sh --test   also what scripts/test.sh needs, with Python packages in .venv
#   scripts/setup.sh --dev    also the environment that makes golden models, in .venv-dev (torch: large)
set -Eeuo pipefail
trap 'echo "setup: error: $BASH_COMMAND (line $LINENO) failed" >&2' ERR
cd "$(dirname "$0")/.."
pins=scripts/packages/bookworm.txt

say() { echo "setup: $*"; }
die() {
  echo "setup: error: $*" >&2
  exit 1
}

kinds=" build "
dev=no
case "${1:-}" in
  "") ;;
  --test) kinds=" build test " ;;
  --dev) kinds=" build test " dev=yes ;;
  *) die "unknown option $1: use --test, --dev or none" ;;
esac
[ $# -le 1 ] || die "one option at most"

command -v dpkg-query > /dev/null && command -v apt-get > /dev/null ||
  die "this script knows Debian's packages only; on another system install those of $pins by hand"
release=$(. /etc/os-release && echo "${VERSION_CODENAME:-unknown}")
if [ "$release" != bookworm ]; then
  say "note: versions are pinned for Debian 12 (bookworm); on $release the distribution's own are used"
fi

# Sets version["package"] for every installed package of the list.
declare -A version
read_installed() {
  local names name status number
  names=$(grep -v '^#' $pins | cut -d' ' -f2 | tr '|' '\n' | cut -d= -f1)
  version=()
  while read -r name status number; do
    if [ "$status" = installed ]; then version[$name]=$number; fi
  done < <(dpkg-query -W -f '${Package} ${db:Status-Status} ${Version}\n' $names 2> /dev/null || true)
}

# The pin of "package=pin" as it counts here.
pin_of() { if [ "$release" = bookworm ]; then echo "${1#*=}"; else echo '*'; fi; }

is_installed() {
  local alternative name
  for alternative in ${1//|/ }; do
    name=${alternative%%=*}
    # shellcheck disable=SC2053 # the pin is a pattern
    [ -n "${version[$name]:-}" ] && [[ ${version[$name]} == $(pin_of "$alternative") ]] && return 0
  done
  return 1
}

missing_packages() {
  local kind package
  while read -r kind package; do
    [[ $kinds == *" $kind "* ]] || continue
    is_installed "$package" || echo "$package"
  done < <(grep -v '^#' $pins)
}

# The first of "a=pin|b=pin" that apt knows, as an argument of apt-get install.
choose() {
  local alternative name pin
  for alternative in ${1//|/ }; do
    name=${alternative%%=*}
    pin=$(pin_of "$alternative")
    if apt-cache show "$name" > /dev/null 2>&1; then
      if [ "$pin" = '*' ]; then echo "$name"; else echo "$name=$pin"; fi
      return 0
    fi
  done
  die "apt knows none of ${1//|/, }: is this release's main archive enabled?"
}

as_root() {
  if [ "$(id -u)" = 0 ]; then
    env DEBIAN_FRONTEND=noninteractive "$@"
  elif command -v sudo > /dev/null; then
    sudo env DEBIAN_FRONTEND=noninteractive "$@"
  else
    die "root is needed for: $*"
  fi
}

install_packages() {
  local missing chosen=() package one
  read_installed
  missing=$(missing_packages)
  if [ -z "$missing" ]; then
    say "Debian packages: all there"
    return
  fi
  say "Debian packages to install:" $(sed "s/=[^|]*//g" <<< "$missing")
  as_root apt-get update -qq || die "apt-get update failed: see above"
  for package in $missing; do
    one=$(choose "$package") || exit 1
    chosen+=("$one")
  done
  as_root apt-get install -qq -y --no-install-recommends "${chosen[@]}" > /dev/null ||
    die "apt-get could not install ${chosen[*]}"
  say "Debian packages: installed ${chosen[*]}"
}

# environment DIRECTORY REQUIREMENTS: a virtual environment that holds exactly these, made anew when
# the requirements change.
environment() {
  local directory=$1 requirements=$2 stamp
  stamp=$(cat scripts/requirements-test.txt "$requirements" | sha256sum | cut -d' ' -f1)
  if [ "$(cat "$directory/requirements.sha256" 2> /dev/null)" = "$stamp" ] &&
    "$directory/bin/python" -c '' 2> /dev/null; then
    say "$directory: up to date"
    return
  fi
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "python3 is $(python3 --version 2>&1): 3.11 or newer is needed"
  say "$directory: installing $requirements (this downloads packages)"
  python3 -m venv --clear "$directory" || die "python3 could not make $directory"
  "$directory/bin/python" -m pip install -q --disable-pip-version-check -r "$requirements" ||
    die "pip could not install $requirements: see above"
  echo "$stamp" > "$directory/requirements.sha256"
  say "$directory: ready"
}

install_packages
[[ $kinds != *" test "* ]] || environment .venv scripts/requirements-test.txt
[ $dev = no ] || environment .venv-dev scripts/requirements-dev.txt
