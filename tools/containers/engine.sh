#!/usr/bin/env bash
# Runs COMMAND with a container engine, `docker compose` and a base image:
#   tools/containers/engine.sh COMMAND [ARG ...]
# The machine's own engine where one answers. Else, on Debian and as root, one from Debian's packages for as long as
# COMMAND runs; what it downloaded, built and holds in volumes stays in $GEMMSERVE_ENGINE_DIR for the next time.
# Where the Dockerfile's own base image can be had from no registry, Debian's Python takes its place (PYTHON_IMAGE).
# Mirrors, proxies, certificates and package indexes are those that this machine's apt and pip are configured with.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
. "$here/debian.sh"
mkdir -p "$work/config/cli-plugins" "$work/run"
# `users` is held, shared, by everybody who has use of the engine: the last one ends it. `lock` orders coming and going.
exec 8>"$work/users" 9>"$work/lock"
flock 9

compose_plugin() { # `docker compose` is no package before trixie; trixie's runs on older releases too
  local found="$work/config/cli-plugins/docker-compose"
  if [ ! -x "$found" ]; then
    say "fetching docker compose"
    from_suite "$work/compose" trixie docker-compose
    cp "$work/compose/usr/libexec/docker/cli-plugins/docker-compose" "$found.new"
    mv "$found.new" "$found"
    rm -rf "$work/compose"
  fi
  export DOCKER_CONFIG=$work/config
}

start_engine() {
  [ -n "$(codename)" ] || fail "no container engine answers; install Docker, or run this on Debian"
  [ "$(id -u)" = 0 ] || fail "no container engine answers, and starting one needs root"
  install docker.io
  # As many open files as may be given: raising the limit takes a privilege that not every machine's root has.
  local files
  files=$(ulimit -Hn)
  [ "$files" != unlimited ] || files=1048576
  cat >"$work/daemon.json" <<JSON
{"data-root": "$work/data", "exec-root": "$work/run/exec", "pidfile": "$work/run/engine.pid",
 "hosts": ["unix://$work/run/engine.sock"],
 "default-ulimits": {"nofile": {"Name": "nofile", "Hard": $files, "Soft": $files}}}
JSON
  export DOCKER_HOST=unix://$work/run/engine.sock PATH=/usr/bin:$PATH
  trap leave EXIT
  flock --shared 8
  docker version >/dev/null 2>&1 && return # somebody else's COMMAND has it running
  setsid dockerd --config-file "$work/daemon.json" >"$work/engine.log" 2>&1 8>&- 9>&- &
  for _ in $(seq 240); do
    docker version >/dev/null 2>&1 && return
    kill -0 $! 2>/dev/null || break
    sleep 0.25
  done
  tail -n 20 "$work/engine.log" >&2
  fail "the engine did not start"
}

leave() { # ends the engine unless somebody else has use of it
  flock 9
  flock --nonblock --exclusive 8 || return 0
  local pid
  pid=$(cat "$work/run/engine.pid" 2>/dev/null) || return 0
  [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = dockerd ] || return 0 # another process has its number by now
  kill "$pid"
  while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done
}

base_image() { # PYTHON_IMAGE: the Dockerfile's own, or a stand-in of the same kind
  local wanted suite stand_in
  suite=$(codename)
  stand_in=gemmserve-python:$suite-$(sha256sum "$here/base-image.sh" | cut -c 1-8)
  wanted=$(sed -n 's/^ARG PYTHON_IMAGE=//p' "$here/../../Dockerfile")
  if docker image inspect "$wanted" >/dev/null 2>&1; then return; fi
  if ! docker image inspect "$stand_in" >/dev/null 2>&1; then
    if timeout 120 docker pull --quiet "$wanted" >/dev/null 2>&1; then return; fi
    [ -n "$suite" ] || fail "$wanted cannot be pulled, and only Debian has a stand-in"
    say "$wanted cannot be pulled; making $stand_in of Debian's packages"
    install mmdebstrap
    "$here/base-image.sh" "$(sources "$suite")" | docker import - "$stand_in" >/dev/null
  fi
  export PYTHON_IMAGE=$stand_in
}

docker version >/dev/null 2>&1 || start_engine
docker compose version >/dev/null 2>&1 || compose_plugin
export DOCKER_BUILDKIT=1
[ -n "${PYTHON_IMAGE:-}" ] || base_image
# What the build needs to know of this machine's pip: see docker-compose.yml, build secrets.
python3 "$here/pip_settings.py" "$work/pip.conf" "$work/ca.pem"
export GEMMSERVE_PIP_CONFIG=$work/pip.conf GEMMSERVE_CA=$work/ca.pem GEMMSERVE_BUILD_NETWORK=host
# Beside this shell, so that a signal reaches it at once, and the engine ends after COMMAND and not before.
flock --unlock 9
"$@" 8>&- 9>&- <&0 &
command=$!
trap 'kill "$command" 2>/dev/null; wait "$command" || :; exit 143' HUP INT TERM
status=0
wait "$command" || status=$?
exit "$status"
