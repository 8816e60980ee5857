"""Cost of traces: `python -m benchmarks.tracing` writes docs/benchmarks/tracing.json.

Two servers run on this machine's processors, one without OpenTelemetry's variables and one with them, whose spans a
collector of this process takes and throws away. Small one-shots go to them over one connection each, in turns and in
another order every round: of no trace, of one that is not sampled, and of one that is. Figures are medians of the
rounds: the processor time of the front, of its event loop's thread and of all its threads (the exporter's is one), by
the kernel's own count (/proc/PID/task/TID/schedstat); and the time from a request to its answer.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import platform
import random
import statistics
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

import numpy as np
import psutil

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "docs" / "benchmarks" / "tracing.json"
N = 64
REQUESTS = 600
ROUNDS = 7
FRONT = "gemmserve_service.processes.front"
ROWS = {
    "off": ("off", ""),
    "off, traceparent": ("off", "01"),
    "on, no traceparent": ("on", ""),
    "on, not sampled": ("on", "00"),
    "on, sampled": ("on", "01"),
}
"""The server, and the flags of the requests' traceparent, "" for none."""


class Collector(BaseHTTPRequestHandler):
    """Take spans, and throw them away."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        """Say nothing."""


def body():
    """Return a form with two matrices, and its boundary."""
    stream = io.BytesIO()
    np.save(stream, np.random.default_rng(0).standard_normal((N, N, 2), np.float32).view(np.complex64)[..., 0])
    parts = [
        f'--x\r\nContent-Disposition: form-data; name="{name}"; filename="{name}.npy"\r\n\r\n'.encode()
        + stream.getvalue()
        + b"\r\n"
        for name in ("a", "b")
    ]
    return b"".join([*parts, b"--x--\r\n"])


def front_of(server):
    """Return the server's process that answers HTTP."""
    (found,) = [child for child in psutil.Process(server.process.pid).children(True) if FRONT in child.cmdline()]
    return found.pid


def spent(pid):
    """Return seconds of processor time: of the first thread, and of all."""
    times = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        times[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return times[pid], sum(times.values())


def measured(connection, pid, flags, data):
    """Return seconds a request: of the event loop's thread, of all threads, from request to answer."""
    latencies = []
    began = spent(pid)
    for _ in range(REQUESTS):
        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        if flags:
            headers["traceparent"] = f"00-{random.getrandbits(128) | 1:032x}-{random.getrandbits(64) | 1:016x}-{flags}"
        sent = time.perf_counter()
        connection.request("POST", "/v1/gemm", data, headers)
        answer = connection.getresponse()
        answer.read()
        latencies.append(time.perf_counter() - sent)
        if answer.status != 200:
            raise RuntimeError(answer.status)
    time.sleep(0.3)  # the exporter's part, with a pause between batches of a tenth of a second
    ended = spent(pid)
    loop, whole = ((after - before) / REQUESTS for before, after in zip(began, ended, strict=True))
    return {"loop_s": loop, "front_s": whole, "latency_s": statistics.median(latencies)}


def main():
    """Command line."""
    sys.path.append(str(ROOT / "examples"))
    from local_server import LocalServer

    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    common = {
        "GEMMSERVE_DEVICE": "cpu",
        "GEMMSERVE_KEEP_ALIVE_S": "600",
        "GEMMSERVE_VERIFY_SHARE": "0",
        "OPENBLAS_NUM_THREADS": "1",
    }
    traced = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_address[1]}",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_BSP_MAX_QUEUE_SIZE": "65536",
    }
    data, rounds = body(), {name: [] for name in ROWS}
    with LocalServer(environment=common) as off, LocalServer(environment={**common, **traced}) as on:
        servers = {"off": off, "on": on}
        pids = {name: front_of(server) for name, server in servers.items()}
        connections = {
            name: http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]))
            for name, server in servers.items()
        }
        for number in range(ROUNDS + 1):
            for name in random.sample(list(ROWS), len(ROWS)):
                server, flags = ROWS[name]
                found = measured(connections[server], pids[server], flags, data)
                if number:  # the first round warms up
                    rounds[name].append(found)
    report = {
        "n": N,
        "requests": REQUESTS,
        "rounds": ROUNDS,
        "environment": {
            "cpus": os.cpu_count(),
            "load": os.getloadavg()[1],
            "machine": platform.machine(),
            "python": platform.python_version(),
            **{name: version(name) for name in ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")},
        },
        "rows": {
            name: {
                key: {
                    "median": statistics.median(each[key] for each in found),
                    "quartiles": statistics.quantiles([each[key] for each in found], n=4)[::2],
                }
                for key in found[0]
            }
            for name, found in rounds.items()
        },
    }
    OUTPUT.write_text(json.dumps(report, indent=1) + "\n")
    for name, row in report["rows"].items():
        print(f"{name:24}" + "  ".join(f"{key} {value['median'] * 1e6:7.1f} us" for key, value in row.items()))


if __name__ == "__main__":
    main()
