"""Time from `docker compose up` to ready, cold and warm, by phase, and the images' sizes: `make containers-time`.

Cold: new volumes, and the kernel's page cache emptied where that is allowed, as after the start of the machine; the
image is built. Warm: the second and later times, with volumes that hold a database. The phases follow each other:

    create   from the command to the container that exists
    start    to its first process running
    front    to the front that has started: interpreter, libraries, database
    ready    to 200 from /readyz: a worker has answered a verified product

`wait` is when `docker compose up --wait` itself returns, which asks the image's HEALTHCHECK every two seconds. Runs
inside tools/containers/engine.sh. Writes docs/benchmarks/containers.json, keeping what it has of other targets.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "docs/benchmarks/containers.json"
PROJECT = "gemmserve-time"
PHASES = ("create", "start", "front", "ready")
STARTED = "Application startup complete"  # the front's line
GIVE_UP_S = 180


def run(*command):
    """Output of a command that must succeed."""
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}")
    return done.stdout.strip()


def compose(target, *arguments):
    return run("docker", "compose", "--profile", target, *arguments)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def moment(text):
    """Seconds since 1970 of the engine's time, which has nanoseconds."""
    whole, _, fraction = text.rstrip("Z").partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")


class Watch(threading.Thread):
    """Asks /readyz every 5 ms; when it first said 200."""

    def __init__(self, port):
        super().__init__(daemon=True)
        self.port, self.ready = int(port), None

    def run(self):
        deadline = time.time() + GIVE_UP_S
        while self.ready is None and time.time() < deadline:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection.request("GET", "/readyz")
                status = connection.getresponse().status
                if status == 200:
                    self.ready = time.time()
            connection.close()
            time.sleep(0.005)


def empty_page_cache():
    """Whether the kernel's page cache could be emptied."""
    run("sync")
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        return False
    return True


def once(target, port):
    """Seconds by phase of one `compose up --wait`."""
    watch = Watch(port)
    began = time.time()
    watch.start()
    compose(target, "up", "--wait", "--no-build")
    returned = time.time()
    watch.join(GIVE_UP_S)
    if watch.ready is None:
        sys.exit(f"{target}: not ready within {GIVE_UP_S} s\n{compose(target, 'logs')}")
    name = f"{PROJECT}-{target}-1"
    created, started = (
        moment(run("docker", "inspect", "-f", each, name)) for each in ("{{.Created}}", "{{.State.StartedAt}}")
    )
    lines = run("docker", "logs", "--timestamps", name).splitlines()
    front = max(moment(line.split()[0]) for line in lines if STARTED in line)
    marks = (began, created, started, front, max(front, watch.ready))
    phases = {name: after - before for name, before, after in zip(PHASES, marks, marks[1:], strict=False)}
    return phases | {"total": watch.ready - began, "wait": returned - began}


def summary(turns):
    """Median, least and most of every phase."""
    return {
        name: {
            "median": round(statistics.median(turn[name] for turn in turns), 3),
            "min": round(min(turn[name] for turn in turns), 3),
            "max": round(max(turn[name] for turn in turns), 3),
        }
        for name in turns[0]
    }


def measure(target, rounds):
    """Cold and warm times of one target."""
    port = free_port()
    os.environ |= {
        "COMPOSE_PROJECT_NAME": PROJECT, "GEMMSERVE_PORT": port, "GEMMSERVE_METRICS_PORT": free_port()
    }  # fmt: skip
    cold, warm, emptied = [], [], True
    try:
        for _ in range(rounds):
            compose(target, "down", "--volumes")
            emptied &= empty_page_cache()
            cold.append(once(target, port))
        for _ in range(rounds):
            compose(target, "down")
            warm.append(once(target, port))
    finally:
        compose(target, "down", "--volumes")
    return {"rounds": rounds, "page_cache_emptied": emptied, "cold": summary(cold), "warm": summary(warm)}


def size(image):
    """Bytes of an image and of the layers that this project adds."""
    total = int(run("docker", "image", "inspect", "-f", "{{.Size}}", image))
    history = run("docker", "history", "--no-trunc", "--human=false", "--format", "{{json .}}", image).splitlines()
    layers = [(int(layer["Size"]), layer["CreatedBy"].split("#")[0].strip()) for layer in map(json.loads, history)]
    own = {text: count for count, text in layers if count and text.startswith(("COPY", "RUN", "/bin/sh", "WORKDIR"))}
    base = os.environ.get("PYTHON_IMAGE", "python:3.12-slim")
    return {"base_image": base, "bytes": total, "base_bytes": total - sum(own.values()), "layers": own}


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--target", choices=("cpu", "cuda", "rocm"), nargs="+", default=["cpu"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size-only", action="store_true", help="start nothing: a device may be missing")
    parser.add_argument("--note", help="what else the machine did, say; written beside the figures")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    report = json.loads(args.output.read_text()) if args.output.exists() else {"targets": {}}
    report["environment"] = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "processors": os.cpu_count(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "engine": run("docker", "version", "-f", "{{.Server.Version}}"),
        "compose": run("docker", "compose", "version", "--short"),
        "load_average": os.getloadavg()[0],
    }
    for target in args.target:
        began = time.monotonic()
        compose(target, "build")
        found = {"note": args.note, "build_s": round(time.monotonic() - began, 1), "image": size(f"gemmserve:{target}")}
        if not args.size_only:
            found |= measure(target, args.rounds)
        report["targets"][target] = found
        print(target, json.dumps(found, indent=1))
    args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
