"""A device full of results whose disk is full, too: what is accepted waits, what is not says why, what needs neither
goes on, and whatever was accepted comes out right in the end, whoever is killed meanwhile.
"""

from __future__ import annotations

import contextlib
import signal

import httpx
import numpy as np
import pytest
from chaos.faults import fill, small_disk
from device_server import DEVICE, Asked, downloaded, metric
from joined_workers import all_joined
from live_server import LiveServer, until

from gemmserve import Client

pytestmark = [
    pytest.mark.flaky(reruns=0),  # a result that is lost once is lost
    pytest.mark.skipif(all_joined(), reason="results of workers that joined come by another way"),
]

N = 256
NBYTES = 8 * N * N
"""Bytes of a result: more than those that are written before their job ends."""
COUNT = 48
"""Jobs: several times as many as the device has room for results of."""
FULL = DEVICE | {
    "GEMMSERVE_DEVICE_MEMORY_BYTES": str(32 * NBYTES),
    "GEMMSERVE_HOST_ARENA_BYTES": "0",
    "GEMMSERVE_RECYCLE_BYTES": "0",
    "GEMMSERVE_ONESHOT_TIMEOUT_S": "60",
    "GEMMSERVE_MAX_GROUPED_JOBS": "1",  # a group fills such a device at one time, however much is written
}

BINARY = {"Content-Type": "application/octet-stream"}


@pytest.fixture
def rng():
    return np.random.default_rng(507)


@pytest.fixture
def disk():
    with small_disk(96) as folder:
        if folder is None:
            pytest.skip("this user may not mount a tmpfs")
        yield folder


def matrix(rng, n=N):
    return (rng.integers(-8, 9, (n, n)) + 1j * rng.integers(-8, 9, (n, n))).astype("complex64")


def ends(server, jobs):
    """Return what the server says of each job."""
    with server.http() as http:
        return [http.get(f"/v1/jobs/{job}").json() for job in jobs]


def succeeded(server, jobs):
    return [end for end in ends(server, jobs) if end["state"] == "succeeded"]


@contextlib.contextmanager
def started(data_dir):
    with LiveServer(data_dir=data_dir, environment=FULL) as server:
        yield server


@pytest.mark.parametrize(
    ("where", "killed"),
    [*(("files", killed) for killed in ("nobody", "worker", "front", "all")), ("everything", "nobody")],
)
def test_both_full_at_once(disk, tmp_path, rng, where, killed):
    """`where`: what lies on the full disk, arrays' files alone, or the database, too, which then cannot put on record
    that jobs have succeeded.
    """
    if where == "files":
        data_dir, extents = tmp_path / "data", disk / "extents"
        data_dir.mkdir()
        extents.mkdir()
        (data_dir / "extents").symlink_to(extents)
    else:
        data_dir = disk / "data"
    operands, small = [matrix(rng) for _ in range(4)], matrix(rng, 20)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(started(data_dir))
        client = stack.enter_context(Client(server.url))
        arrays = [client.put(each) for each in operands]
        (worker,) = server.workers()
        worker.suspend()
        pairs = [(number % 4, number // 4 % 4, 20 + number // 16) for number in range(COUNT)]
        jobs = [client.submit("gemm", arrays[a], arrays[b], alpha=alpha).id for a, b, alpha in pairs]
        fill(disk / "filler")
        worker.resume()
        # Nothing runs though jobs wait: both are full.
        until(lambda: metric(server, "jobs_running") == 0 < metric(server, "queue_depth"))
        held = metric(server, "device_unwritten_bytes")
        assert held < metric(server, "device_cache_budget_bytes")
        assert metric(server, "queue_depth") == COUNT - held / NBYTES
        # What is new and needs room is refused.
        job = {"op": "gemm", "a": arrays[0].id, "b": arrays[0].id}
        with server.http() as http:
            upload = http.post("/v1/arrays?dtype=complex64&shape=512,512", content=bytes(8 << 18), headers=BINARY)
            for answer in (http.post("/v1/jobs", json=job), upload):
                assert (answer.status_code, answer.json()["type"]) == (507, "/problems/store-full"), answer.text
        # What needs none is computed.
        np.testing.assert_array_equal(client.gemm(small, small, alpha=2), 2 * (small @ small))
        deleted = set()
        if where == "files":
            done = succeeded(server, jobs)
            assert len(done) * NBYTES == held
            asked = Asked(server, done[-1]["result"]["d"])
            # Room on the device alone is enough for the next.
            for end in done[:3]:
                client.delete(end["result"]["d"])
            deleted = {end["id"] for end in done[:3]}
            until(lambda: len(succeeded(server, jobs)) >= len(done) + 3)
            assert not asked.answered
        else:
            assert not succeeded(server, jobs)
        if killed == "worker":
            worker.kill()
            worker.wait(60)
        elif killed == "front":
            front = server.front()
            front.kill()
            front.wait(60)
            server.wait_ready()
        elif killed == "all":
            server.terminate(signal.SIGKILL)
            server = stack.enter_context(started(data_dir))
        if killed != "nobody":  # what was lost is to be computed again, into files that there is no room for
            until(lambda: "waits: the disk has no room" in server.text)
            assert metric(server, "results_recomputed_total") > 0
        (disk / "filler").unlink()
        until(lambda: len(succeeded(server, jobs)) == COUNT)
        for (a, b, alpha), end in zip(pairs, ends(server, jobs), strict=True):
            if end["id"] in deleted:
                with pytest.raises(httpx.HTTPStatusError):
                    downloaded(server, end["result"]["d"], (N, N))
            else:
                found = downloaded(server, end["result"]["d"], (N, N))
                np.testing.assert_array_equal(found, alpha * (operands[a] @ operands[b]))
        if where == "files" and killed in {"nobody", "worker"}:
            (a, b, alpha) = pairs[jobs.index(done[-1]["id"])]
            assert asked.bytes() == (alpha * (operands[a] @ operands[b])).tobytes()
        assert metric(server, "results_lost_total") == 0
