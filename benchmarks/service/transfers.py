"""Streams of large bodies with and without transfer processes: rate, the front's processor time, and small requests
beside them.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import threading

import psutil
from benchmarks.service import histogram
from benchmarks.service.agents import load_generator
from benchmarks.service.memory import FRONT, MIB, stored_array
from benchmarks.service.servers import KINDS, Server, processor_seconds

PROCESSES = (0, 1, 2)
STREAMS = (1, 4)
RECYCLED = 4 << 30
"""Bytes of free extents that a server keeps: every upload lands in space that was used before."""
BESIDE_PER_S = 200.0
"""Small requests beside the streams."""


class Streams:
    """Servers with that many transfer processes, and two load generators. A context manager."""

    def __init__(self, case, extra):
        self._case, self._extra = case, extra

    def __enter__(self):
        self._stack = contextlib.ExitStack()
        try:
            self._load, self._beside = (self._stack.enter_context(load_generator()) for _ in range(2))
            self._servers = {processes: self._server(processes) for processes in PROCESSES}
            self._stored = {
                processes: stored_array(server, self._case.n) for processes, server in self._servers.items()
            }
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *details):
        self._stack.__exit__(*details)

    def _server(self, processes):
        arguments, variables = self._extra
        more = ("--transfer-processes", str(processes), "--recycle-bytes", str(RECYCLED))
        return self._stack.enter_context(Server(KINDS["gemmserve"], (*arguments, *more), variables))

    def turn(self, processes, streams, direction):
        """{mib_s, front_cpu_s_per_gib, beside}: of streams that follow each other for as long as a turn takes."""
        server, case = self._servers[processes], self._case
        path = f"/v1/arrays/{self._stored[processes]}/data"
        work = {"operation": "upload", "n": case.n // 8} if direction == "up" else {
            "operation": "download", "n": case.n, "path": path}  # fmt: skip
        common = {"address": server.address, "protocol": "gemmserve", "seconds": case.seconds}
        small = {"operation": "download", "n": None, "path": "/livez", "rate": BESIDE_PER_S, "clients": 8}
        beside = []
        thread = threading.Thread(target=lambda: beside.append(self._beside.ask(**common, **small)))
        front = psutil.Process(server.find(FRONT).pid)
        before = processor_seconds(front)
        thread.start()
        answer = self._load.ask(**common, **work, clients=streams)
        thread.join()
        gib = (answer["count"] + streams) * case.n / (1 << 30)  # with those that warm up
        return {
            "mib_s": answer["per_s"] * case.n / MIB,
            "front_cpu_s_per_gib": (processor_seconds(front) - before) / gib,
            "histogram": beside[0]["histogram"],
        }


def measure(case, *, extra=None, say=print):
    """Rows of the case: of every number of processes and streams, up and down. Raises ServerError, AgentError."""
    found = {}
    with Streams(case, (extra or {}).get("gemmserve", ((), {}))) as all_streams:
        for number in range(case.rounds):
            order = PROCESSES if number % 2 else PROCESSES[::-1]
            for streams, direction, processes in itertools.product(STREAMS, ("up", "down"), order):
                turn = all_streams.turn(processes, streams, direction)
                found.setdefault((streams, direction, processes), []).append(turn)
    rows = [row(case, key, turns, found[*key[:2], 0]) for key, turns in found.items()]
    for each in rows:
        say("  " + " | ".join(cells(each)))
    return rows, {}


def row(case, key, turns, plain):
    """What the rounds say; `plain`: the same without transfer processes."""
    streams, direction, processes = key
    pairs = zip(turns, plain, strict=True)
    return {
        "case": case.name, "via": "wire", "nbytes": case.n, "streams": streams, "direction": direction,
        "processes": processes, "mib_s": [turn["mib_s"] for turn in turns],
        "over_none": statistics.median(one["mib_s"] / other["mib_s"] for one, other in pairs),
        "front_cpu_s_per_gib": statistics.median(turn["front_cpu_s_per_gib"] for turn in turns),
        "beside": histogram.summary(histogram.merged(turn["histogram"] for turn in turns)),
    }  # fmt: skip


COLUMNS = (
    "streams", "transfer processes", "MiB/s", "over none", "front's CPU s/GiB", "/livez p50 ms", "p99 ms",
)  # fmt: skip


def cells(row):
    """A line of the table."""
    beside = row["beside"]
    return [
        f"{row['streams']} {row['direction']}", str(row["processes"]), f"{statistics.median(row['mib_s']):.0f}",
        f"{row['over_none']:.2f}x", f"{row['front_cpu_s_per_gib']:.2f}",
        *(f"{beside[name]:.3g}" if beside["count"] else "-" for name in ("p50_ms", "p99_ms")),
    ]  # fmt: skip
