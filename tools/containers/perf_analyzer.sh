#!/usr/bin/env bash
# Runs NVIDIA's perf_analyzer, the load generator of tritonserver, as PyPI has it:
#   tools/containers/perf_analyzer.sh -m gemm -u 127.0.0.1:8000 --shape a:64,64 --shape b:64,64
# Its binary wants glibc 2.38. On an older Debian it is started by the loader, and with the libraries, of Debian 13.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
. "$here/debian.sh"
version=2.60.0
tool=$work/perf_analyzer-$version
if [ ! -x "$tool/perf_analyzer/bin/perf_analyzer" ]; then
  say "fetching perf_analyzer $version"
  rm -rf "$tool.new"
  "${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary :all: --platform manylinux_2_38_x86_64 \
    --dest "$tool.new" "perf-analyzer==$version"
  "${PYTHON:-python3}" -m zipfile --extract "$tool.new"/*.whl "$tool.new"
  chmod +x "$tool.new/perf_analyzer/bin/perf_analyzer"
  rm -rf "$tool"
  mv "$tool.new" "$tool"
fi
glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d ' ' -f 2)
if [ "$(printf '%s\n' 2.38 "$glibc" | sort --version-sort | head -n 1)" = 2.38 ]; then
  exec "$tool/perf_analyzer/bin/perf_analyzer" "$@"
fi
[ -n "$(codename)" ] || fail "perf_analyzer wants glibc 2.38, and only Debian has it as packages here"
libraries=$work/trixie-libraries
if [ ! -d "$libraries" ]; then
  say "fetching Debian 13's C library"
  rm -rf "$libraries.new"
  from_suite "$libraries.new" trixie libc6 libgcc-s1 libssl3t64 libstdc++6 libzstd1 zlib1g
  mv "$libraries.new" "$libraries"
fi
lib=$libraries/usr/lib/x86_64-linux-gnu
exec "$lib/ld-linux-x86-64.so.2" --library-path "$lib" "$tool/perf_analyzer/bin/perf_analyzer" "$@"
