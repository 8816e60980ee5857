#!/usr/bin/env bash
# Runs promtool, the machine's own or the one of Debian's package prometheus, in the folder of the rules:
#   tools/containers/promtool.sh test rules alerts_test.yml
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
. "$here/debian.sh"
tool=$(command -v promtool || echo "$work/prometheus/usr/bin/promtool")
if [ ! -x "$tool" ]; then
  [ -n "$(codename)" ] || fail "promtool is not on the path, and only Debian has a package of it here"
  from_suite "$work/prometheus.new" "$(codename)" prometheus
  rm -rf "$work/prometheus"
  mv "$work/prometheus.new" "$work/prometheus"
fi
cd "$here/../../deploy/prometheus"
exec "$tool" "$@"
