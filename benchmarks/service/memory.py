"""Anonymous memory (RssAnon) of the front process while a large array is uploaded and downloaded."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from pathlib import Path

import psutil
from benchmarks.service.agents import load_generator
from benchmarks.service.servers import KINDS, Server

FRONT = "gemmserve_service.processes.front"
EVERY_S = 0.01
SETTLE_S = 1.0
MIB = 1 << 20


def rss_anon(pid):
    """Bytes, from /proc."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise LookupError("no RssAnon: not Linux")


class Watch(threading.Thread):
    """The largest RssAnon while it runs. A context manager."""

    def __init__(self, pid):
        super().__init__(daemon=True)
        self._pid, self._over, self.largest = pid, threading.Event(), rss_anon(pid)

    def run(self):
        while not self._over.wait(EVERY_S):
            self.largest = max(self.largest, rss_anon(self._pid))

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self.join()


def fitting(nbytes, folder="/tmp"):
    """No more than a third of the free disk, and of the memory that is available: the array may lie in either."""
    room = min(psutil.disk_usage(folder).free, psutil.virtual_memory().available) // 3
    while nbytes > room:
        nbytes //= 2
    return nbytes


def measure(case, *, extra=None, say=print):
    """Rows of the case: idle, and the most during an upload and a download, in bytes."""
    nbytes = fitting(case.n)
    arguments, variables = (extra or {}).get("gemmserve", ((), {}))
    with Server(KINDS["gemmserve"], arguments, variables) as server, load_generator() as load:
        pid = server.find(FRONT).pid
        common = {"address": server.address, "protocol": "gemmserve", "seconds": 600}
        load.ask(**common, operation="upload", n=MIB, most=20, warm=1)  # what every server has after a few requests
        time.sleep(SETTLE_S)
        idle = rss_anon(pid)
        with Watch(pid) as up:
            load.ask(**common, operation="upload", n=nbytes // 8, most=1, warm=0)
        stored = stored_array(server, nbytes)
        time.sleep(SETTLE_S)
        with Watch(pid) as down:
            load.ask(**common, operation="download", n=nbytes, path=f"/v1/arrays/{stored}/data", most=1, warm=0)
    row = {
        "case": case.name, "who": "gemmserve", "nbytes": nbytes, "asked": case.n, "idle": idle,
        "upload": up.largest - idle, "download": down.largest - idle,
    }  # fmt: skip
    say(f"  {nbytes >> 20} MiB: idle {idle >> 20} MiB, over it {row['upload'] >> 20} up, {row['download'] >> 20} down")
    return [row], {}


def stored_array(server, nbytes):
    """The id of an array of that size, uploaded in pieces."""
    piece = bytes(4 * MIB)

    def pieces():
        for _ in range(nbytes // len(piece)):
            yield piece

    request = urllib.request.Request(
        f"{server.url}/v1/arrays?dtype=complex64&shape={nbytes // 8}",
        data=pieces(),
        headers={"Content-Type": "application/octet-stream", "Content-Length": str(nbytes)},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.loads(answer.read())["id"]
