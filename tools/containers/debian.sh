# Debian's packages from wherever this machine's apt has them; for the scripts beside this one, which source it.
# shellcheck shell=bash
work=${GEMMSERVE_ENGINE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/gemmserve-engine}
mkdir -p "$work"

say() { echo "engine: $*" >&2; }
fail() { say "$*"; exit 1; }

install() { # Debian packages, unless they are there
  # A package that was removed has a status, too: "rc" for its configuration files.
  [ "$(dpkg-query --show --showformat '${db:Status-Abbrev}\n' "$@" 2>/dev/null | grep -c '^ii')" != $# ] || return 0
  [ "$(id -u)" = 0 ] || fail "needs root to install $*"
  say "installing $*"
  local quiet=(-qq -o DPkg::Lock::Timeout=300)
  apt-get "${quiet[@]}" update
  DEBIAN_FRONTEND=noninteractive apt-get "${quiet[@]}" install -y --no-install-recommends "$@" >/dev/null
}

mirror() { # where this machine's apt has Debian from
  apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | sed -n 1p
}

sources() { # that mirror as a sources.list line for SUITE
  local uri
  uri=$(mirror)
  [ -n "$uri" ] || { apt-get -qq update >&2; uri=$(mirror); }
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $uri $1 main"
}

from_suite() { # FOLDER SUITE PACKAGE...: these packages as SUITE has them, without what they depend on, unpacked
  local target=$1 suite=$2 apt="$work/apt-$2"
  shift 2
  mkdir -p "$apt/lists/partial" "$apt/archives"
  sources "$suite" >"$apt/sources.list"
  local options=(-qq -o Dir::Etc::SourceList="$apt/sources.list" -o Dir::Etc::SourceParts=/dev/null
    -o Dir::State::Lists="$apt/lists" -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update
  (cd "$apt/archives" && rm -f ./*.deb && apt-get "${options[@]}" download "$@")
  for package in "$apt"/archives/*.deb; do dpkg-deb -x "$package" "$target"; done
  rm -rf "$apt"
}

codename() { # of this machine's Debian; nothing on another system
  (. /etc/os-release 2>/dev/null && [ "${ID:-}" = debian ] && echo "${VERSION_CODENAME:-}") || :
}
