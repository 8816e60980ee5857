"""Stage of a load test: servers, client processes, load generators, what the kernels take by themselves."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from benchmarks.load.gauges import Gauges
from benchmarks.service.agents import Agent, load_generator
from benchmarks.service.servers import KINDS, Server

RECYCLED = 8 << 30
"""Bytes of freed space that servers keep: the second upload of `transfer_bytes` lands in space that was used."""
ARENA_BYTES = 40 << 30
SETTINGS = {
    "GEMMSERVE_VERIFY_SHARE": "0",
    "GEMMSERVE_HOST_ARENA_BYTES": str(ARENA_BYTES),
    "GEMMSERVE_ARENA_AHEAD_BYTES": str(ARENA_BYTES),
}
"""No product is checked by chance: a check takes as long as a short product. The arena is what a host of 128 GiB can
spare, registered before it is needed."""
PATIENCE_S = 300.0
POLL_S = 0.05
RARELY_S = 0.25
STILL_S = 15.0
"""Seconds without another word of a worker, which says how far it is every few seconds, after which it is done."""
DRAIN_S = 120.0
"""Within which jobs that were accepted are done, and results stored."""
GENERATORS = 4
SHARE_OF_ROOM = 0.7
"""Share of the free space that results may take; the rest is left to operands, clients and whoever else is there."""


class Stage:
    """Context manager: client processes and load generators, started once, and what the kernels took.

    `kernels` is the answer of `benchmarks.load.kernels`.
    """

    def __init__(self, device, sizes, folder, seed=None):
        self.device, self.sizes, self.folder, self.seed = device, sizes, folder, seed
        self._server, self._shared = None, contextlib.ExitStack()
        self._operands = {}

    def __enter__(self):
        self._stack = contextlib.ExitStack()
        self._stack.callback(self.end_server)
        try:
            with Agent("-m", "benchmarks.load.kernels") as bare:
                products = {"sizes": self.sizes.products, "streams": self.sizes.streams}
                self.kernels = bare.ask(device=self.device, seconds=min(1.0, self.sizes.turn_s), **products)
            agents = (Agent("-m", "benchmarks.load.client") for _ in range(self.sizes.clients))
            self.clients = [self._stack.enter_context(agent) for agent in agents]
            self.generators = [self._stack.enter_context(load_generator()) for _ in range(GENERATORS)]
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *details):
        self._stack.__exit__(*details)

    @property
    def server(self):
        """The server that rows share, started when it is first asked for. Raises ServerError."""
        if self._server is None:
            self._server = self._shared.enter_context(serving(self.device.partition(",")[0], self.folder))
            settled(self._server)
        return self._server

    def end_server(self):
        """End the shared server, if it runs, and forget what was on it: others need the device's memory."""
        self._shared.close()
        self._server, self._operands = None, {}

    def log(self):
        """Return the end of the shared server's log, if it runs."""
        return self._server.tail() if self._server else ""

    def kernel_s(self, n):
        """Return the seconds of a product of that extent in a loop of the kernels alone."""
        return self.kernels["products"][str(n)]["seconds"]

    def watch(self):
        """Return gauges of the shared server."""
        return Gauges(self.server)

    def operands(self, n):
        """Return pairs of ids of resident operands of that extent on the shared server, put there once: every pair of
        two left and two right ones.
        """
        if n not in self._operands:
            self._operands[n] = pairs(self.clients[0], self.server, n)
        return self._operands[n]

    def all_clients(self, url, commands, clients=None):
        """Ask client processes (by default all) at one time, a command each; return the answers. Raises AgentError."""
        with ThreadPoolExecutor(len(commands)) as pool:
            asked = [
                pool.submit(client.ask, PATIENCE_S, url=url, **command)
                for client, command in zip(clients or self.clients, commands, strict=False)
            ]
            return [each.result() for each in asked]

    def room(self, nbytes, most):
        """Return how many results of `nbytes` may lie in the store at one time, `most` at most and a few at least."""
        return max(self.sizes.clients, min(most, int(SHARE_OF_ROOM * free_bytes(self.folder) / nbytes)))


def pairs(client, server, n, **more):
    """Put four matrices on a server; return the pairs of ids of two left and two right ones."""
    ids = client.ask(PATIENCE_S, work="put", url=server.url, n=n, count=4, **more)["ids"]
    return [[a, b] for a in ids[:2] for b in ids[2:]]


@contextlib.contextmanager
def serving(device, folder, *arguments, data=None, **variables):
    """Yield a server of this checkout on `device`, its data below `folder`, gone with its data afterwards; in the
    folder `data` instead, it stays. Raises ServerError.
    """
    with contextlib.ExitStack() as stack:
        if data is None:
            data = stack.enter_context(tempfile.TemporaryDirectory(prefix="gemmserve-load-", dir=folder))
        place = ("--data-dir", f"{data}/data", "--uds", "{path}", "--recycle-bytes", str(RECYCLED))
        environment = {**SETTINGS, "PYTHONPATH": absolute_path(), **variables}
        with Server(KINDS["gemmserve"], ("--device", device, *place, *arguments), environment) as server:
            try:
                yield server
            except Exception as error:
                error.add_note(server.tail())
                raise


def absolute_path():
    """Return PYTHONPATH for processes that run in another folder."""
    found = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(str(Path(part).resolve()) for part in found.split(os.pathsep) if part)


def gauge(server, name, api_key=None):
    """Return the sum of a metric over its labels; 0.0 where the server has no such samples."""
    head = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{server.url}/metrics", headers=head)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if line.partition("{")[0].partition(" ")[0] == name)
    return sum(float(value) for _, _, value in samples)


def settled(server, devices=1, api_key=None):
    """Wait until the workers have prepared what they do ahead of tasks, or get no further: kernels of likely products
    loaded, the host arena registered. Meanwhile they take processors and hold the driver up, unless they have tasks.

    Return what is prepared, {"kernels": whether all were loaded, "registered_bytes"}, and note it with the server:
    `Gauges` add it to what they say.
    """
    ahead = float(SETTINGS["GEMMSERVE_ARENA_AHEAD_BYTES"])
    wanted = devices * min(gauge(server, "gemmserve_host_arena_bytes", api_key), ahead)
    found, loading, until = 0.0, True, time.monotonic() + STILL_S
    while (loading or found < wanted) and time.monotonic() < until:
        before, found = (found, loading), gauge(server, "gemmserve_device_registered_bytes", api_key)
        loading = gauge(server, "gemmserve_device_preparing", api_key) > 0
        if (found, loading) != before:
            until = time.monotonic() + STILL_S
        time.sleep(POLL_S)
    server.prepared = {"kernels": not loading, "registered_bytes": int(found)}
    return server.prepared


def wait_for_none(server, *names, within_s=DRAIN_S, poll_s=POLL_S):
    """Wait until the metrics of those names are all 0, asked for every `poll_s`. Raises TimeoutError."""
    end = time.monotonic() + within_s
    while any(gauge(server, name) for name in names):
        if time.monotonic() > end:
            raise TimeoutError(f"{', '.join(names)} were not 0 within {within_s:.0f} s")
        time.sleep(poll_s)


def drained(server):
    """Wait until no job waits or runs. Raises TimeoutError.

    Asked for rarely: an answer takes milliseconds of the front, whose time for a job is measured meanwhile.
    """
    wait_for_none(server, "gemmserve_queue_depth", "gemmserve_jobs_running", poll_s=RARELY_S)


def roomiest():
    """Return the folder with most room for arrays: the temporary one or that of shared memory."""
    candidates = [path for path in (Path(tempfile.gettempdir()), Path("/dev/shm")) if os.access(path, os.W_OK)]
    return max(candidates, key=free_bytes)


def free_bytes(folder):
    """Return the bytes that files in a folder may still take: no more than the memory that is free, where they lie in
    memory.
    """
    free = psutil.disk_usage(str(folder)).free
    return min(free, psutil.virtual_memory().available) if file_system(folder) == "tmpfs" else free


def file_system(folder):
    """Return the kind of file system that a folder lies on, as /proc/mounts names it."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    above = [(len(where), kind) for where, kind in mounts if Path(folder).resolve().is_relative_to(where)]
    return max(above)[1]
