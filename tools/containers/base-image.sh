#!/usr/bin/env bash
# Writes, as a tar file on standard output, a small Debian with its Python in place of python:*-slim:
#   tools/containers/base-image.sh 'deb URI SUITE main'
# Packages are unpacked and not configured, which takes seconds instead of a minute: users, menus and the like are missing,
# and nothing that runs in these images asks for them. Python's own modules are compiled, as the packages' scripts would.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
include=base-files,dash,coreutils,findutils,libstdc++6,python3,python3-venv,python-is-python3
options=(--quiet --variant=extract --include="$include")
# Proxies and the like of this machine's apt, which mmdebstrap's own does not read.
while read -r option; do options+=(--aptopt="$option"); done < <(
  apt-config dump --format '%F "%v";%n' | grep -E '^Acquire::(https?::|Check-|Retries)' || :)
suite=$(awk '{ for (i = 1; i < NF; i++) if ($i ~ /^[a-z]+:\/\//) { print $(i + 1); exit } }' <<<"$1")
mmdebstrap "${options[@]}" "$suite" "$folder/root" "$1"
cd "$folder/root"
for path in doc man locale info lintian perl; do rm -rf "usr/share/$path"; done
rm -rf var/lib/apt var/cache/* usr/lib/*/gconv usr/lib/*/perl usr/lib/*/libperl.so*
chroot . python3 -m compileall -q -j 0 -x '/(test|idlelib|lib2to3|turtledemo)/' /usr/lib/python3*/ >/dev/null
tar --numeric-owner -c .
