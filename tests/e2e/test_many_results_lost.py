"""A real worker killed with hundreds of results that its device alone has: all of them come back, bit for bit, and no
process holds them twice meanwhile.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from device_server import DEVICE, downloaded, metric
from joined_workers import all_joined
from live_server import LiveServer, until

from gemmserve import Client

pytestmark = [
    pytest.mark.flaky(reruns=0),  # a result that is lost once is lost
    pytest.mark.skipif(all_joined(), reason="results of workers that joined come by another way"),
]

N = 256
OPERANDS = 8
SCALES = tuple(2.0**power for power in range(5))
COUNT = OPERANDS**2 * len(SCALES)
NBYTES = 8 * N * N
"""Bytes of a result: more than those that are written before their job ends."""
ALL = COUNT * NBYTES


class Memory:
    """The most memory of its own, no file's and no shared one, that a front or a worker had; a thread looks."""

    def __init__(self, server):
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.most = {"front": 0, "worker": 0}
        self.looks = 0

    def __enter__(self):
        self._look()
        self.began = dict(self.most)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    @property
    def grown(self):
        """Bytes that each has had more than at first."""
        return {name: self.most[name] - self.began[name] for name in self.most}

    def _run(self):
        while not self._over.wait(0.05):
            self._look()

    def _look(self):
        if not self.looks % 10:  # a worker that was killed is followed by another
            self._processes = {"front": [self._server.front()], "worker": self._server.workers()}
        self.looks += 1
        for name, processes in self._processes.items():
            for process in processes:
                try:
                    memory = process.memory_info()
                except psutil.Error:
                    continue
                self.most[name] = max(self.most[name], memory.rss - memory.shared)


def test_a_worker_killed_with_hundreds_of_results_loses_none_of_them(tmp_path):
    rng = np.random.default_rng(300)
    matrices = [
        (rng.standard_normal((N, N)) + 1j * rng.standard_normal((N, N))).astype("complex64") for _ in range(OPERANDS)
    ]
    with LiveServer(data_dir=tmp_path, environment=DEVICE) as server, Client(server.url) as client:
        arrays = [client.put(each) for each in matrices]
        pairs = [(a, b) for a in range(OPERANDS) for b in range(OPERANDS)]
        before = {(a, b): (arrays[a] @ arrays[b]).numpy() for a, b in pairs}
        with Memory(server) as memory, ThreadPoolExecutor(4) as pool:
            asked = [(*pair, scale) for scale in SCALES for pair in pairs]
            jobs = list(
                pool.map(lambda each: client.submit("gemm", arrays[each[0]], arrays[each[1]], alpha=each[2]), asked)
            )
            results = [job.result() for job in jobs]
            assert metric(server, "device_unwritten_bytes") == ALL, "the device alone has them"
            (worker,) = server.workers()
            worker.kill()
            worker.wait(60)
            found = list(pool.map(lambda each: downloaded(server, each.id, (N, N)), results))
            until(lambda: metric(server, "device_unwritten_bytes") == 0)
            assert metric(server, "results_recomputed_total") == COUNT
            assert metric(server, "results_lost_total") == 0
            states = {client.job(job.id).state for job in jobs}
        assert states == {"succeeded"}
        for (a, b, scale), each in zip(asked, found, strict=True):
            np.testing.assert_array_equal(each, np.float32(scale) * before[a, b])
        for (a, b), each in before.items():
            exact = matrices[a].astype("complex128") @ matrices[b]
            assert np.linalg.norm(each - exact) < 1e-5 * np.linalg.norm(exact)
    # The stand-in's device is memory of its worker, which has every result there once; the front has none of its own.
    assert memory.grown["worker"] > ALL / 2, "or it was not looked at"
    assert memory.grown["worker"] < 1.5 * ALL, memory.grown
    assert memory.grown["front"] < ALL / 4, memory.grown
