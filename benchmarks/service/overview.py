"""Cost of the overview for the front: python -m benchmarks.service overview.

Processor time of the front process while so many streams of `/v1/overview/stream` are open, on a server that is idle,
and on one that answers a few products a second, so that its overview changes all the time; and of one ended job, with
the observer that the overview adds to the metrics'.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import io
import os
import platform
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from benchmarks.service.memory import FRONT
from benchmarks.service.results import ROOT, digest, write
from benchmarks.service.run import variables_of
from benchmarks.service.servers import KINDS, Server

from gemmserve_service.http.metrics.metrics import Metrics
from gemmserve_service.http.overview.recent import Recent
from gemmserve_service.jobs.core import Core
from gemmserve_service.jobs.one_shot import EndedJob
from gemmserve_service.schemas import JobState, Timings
from gemmserve_service.settings import Settings

_SETTLE_S = 6.0  # in which a first point of the history has been made
_PRODUCTS_PER_S = 10.0
_CALLS = 20_000
_ROUNDS = 25  # in turns, of which the least counts: the machine does other things too


def processor_s(pid):
    """Return the seconds for which a process's threads have run, by the scheduler's nanoseconds."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


@contextlib.contextmanager
def listeners(address, count):
    """Streams that are read in threads until the block ends; yields the list of how many bytes each has had."""
    connections, received = [], [0] * count

    def read(number, answer):
        with contextlib.suppress(OSError, ValueError, AttributeError, http.client.HTTPException):  # closed
            while piece := answer.read1(1 << 16):
                received[number] += len(piece)

    threads = []
    for number in range(count):
        connection = http.client.HTTPConnection(*address)
        connection.request("GET", "/v1/overview/stream")
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"a stream is answered {answer.status}")
        connections.append((connection, answer))
        threads.append(threading.Thread(target=read, args=(number, answer), daemon=True))
        threads[-1].start()
    try:
        yield received
    finally:
        for connection, _ in connections:
            if connection.sock is not None:
                connection.sock.shutdown(2)
        for thread in threads:
            thread.join(10)


@contextlib.contextmanager
def products(address, per_s):
    """Small products until the block ends, so many a second."""
    over = threading.Event()
    file = io.BytesIO()
    np.save(file, np.ones((64, 64), "complex64"))
    lines = []
    for name in ("a", "b"):
        head = f'Content-Disposition: form-data; name="{name}"; filename="{name}.npy"'
        lines += [b"--x", head.encode(), b"", file.getvalue()]
    body = b"\r\n".join([*lines, b"--x--", b""])

    def send():
        connection = http.client.HTTPConnection(*address)
        while not over.wait(1 / per_s):
            connection.request("POST", "/v1/gemm", body, {"Content-Type": "multipart/form-data; boundary=x"})
            if (answer := connection.getresponse()).status != 200:
                raise RuntimeError(answer.read())
            answer.read()

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)


def measure(server, count, seconds, *, busy):
    """Return the front's share of a core and the bytes a second of one stream."""
    pid = server.find(FRONT).pid
    load = products(server.address, _PRODUCTS_PER_S) if busy else contextlib.nullcontext()
    with load, listeners(server.address, count) as received:
        time.sleep(_SETTLE_S)
        had, before, began = sum(received), processor_s(pid), time.perf_counter()
        time.sleep(seconds)
        elapsed = time.perf_counter() - began
        share = (processor_s(pid) - before) / elapsed
        streamed = (sum(received) - had) / elapsed / max(count, 1)
    return {"core_share": round(share, 5), "stream_bytes_per_s": round(streamed)}


def ended_job_us():
    """Return microseconds of one `job_ended`, by observers, of a one-shot product that has succeeded."""
    job = EndedJob("job", "gemm", "", JobState.SUCCEEDED, Timings(kernel_s=1e-3), "numpy")
    with tempfile.TemporaryDirectory() as folder:
        metrics = Metrics(Core(Settings(data_dir=Path(folder)), _NoWorkers()))
        best = {}
        for _ in range(_ROUNDS):
            for name, observers in (("metrics", [metrics]), ("metrics and overview", [metrics, Recent()])):
                began = time.process_time()
                for _ in range(_CALLS):
                    for observer in observers:
                        observer.job_ended(job, 100, 100)
                spent = time.process_time() - began
                best[name] = min(best.get(name, spent), spent)
    return {name: round(spent / _CALLS * 1e6, 3) for name, spent in best.items()}


class _NoWorkers:
    """An executor that there is none of."""

    def workers(self):
        return []


def main(arguments):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service overview", description=__doc__)
    parser.add_argument("--listeners", type=int, nargs="+", default=[0, 1, 10, 32])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(arguments)
    rows = []
    with Server(KINDS["gemmserve"], (), variables_of(ROOT)) as server:
        for busy in (False, True):
            for count in args.listeners:
                row = {"load": "products" if busy else "idle", "listeners": count}
                rows.append(row | measure(server, count, args.seconds, busy=busy))
                print(f"{row['load']:9}{count:4} streams: {rows[-1]['core_share']:8.3%} of a core", flush=True)
    calls = ended_job_us()
    print(*(f"job_ended, {name}: {us} us" for name, us in calls.items()), sep="\n")
    if args.output:
        about = {
            "python": platform.python_version(), "cpus": os.cpu_count(), "seconds": args.seconds,
            "products_per_s": _PRODUCTS_PER_S,
        }  # fmt: skip
        write(args.output, {"environment": about, "sources": digest(), "rows": rows, "job_ended_us": calls})
