"""A real server with a device (the stand-in of tests/support) whose results stay there: killed, chained, deleted."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from live_server import LiveServer, until
from python_path import python_path

from gemmserve import Client

SUPPORT = Path(__file__).parents[1] / "support"
DEVICE = {
    "PYTHONPATH": python_path(SUPPORT / "device_on_host", SUPPORT / "cupy_on_numpy"),
    "GEMMSERVE_DEVICE": "cuda:0",
    "GEMMSERVE_WRITE_BACK_DELAY_S": "60",  # nothing is written that nobody asks for
}
N = 300
"""Rows of complex64 that make a result large enough to stay."""


@pytest.fixture
def rng():
    return np.random.default_rng(6)


@pytest.fixture
def data_dir(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def start(data_dir):
    def begin():
        return LiveServer(data_dir=data_dir, environment=DEVICE)

    return begin


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Server whose share for copies, of the stand-in's 144 GB, is that of some forty results; half of what may stay on
    the device is that of ten."""
    share = {"GEMMSERVE_DEVICE_CACHE_SHARE": str(42 * 8 * N * N / 144e9)}
    with LiveServer(data_dir=tmp_path_factory.mktemp("data"), environment=DEVICE | share) as live:
        yield live


@pytest.fixture
def shared(server):
    """With nothing on its device: whatever other tests left there would be written while this one counts."""
    with Client(server.url) as client:
        for array in client.arrays():
            client.delete(array.id)
    until(lambda: metric(server, "device_unwritten_bytes") == 0)
    return server


def matrix(rng):
    return (rng.standard_normal((N, N)) + 1j * rng.standard_normal((N, N))).astype("complex64")


def metric(server, name):
    with server.http() as http:
        found = re.search(rf"^gemmserve_{name}(?:{{.*}})? (\S+)$", http.get("/metrics").text, re.MULTILINE)
    return None if found is None else float(found[1])


def as_written(client, ra, rb):
    """The bits of ra @ rb where no device is lost, checked there."""
    job = client.submit("gemm", ra, rb, verify=True)
    found = job.result().numpy()
    assert job.info.residual < 1e-5
    return found


def downloaded(server, array_id):
    with server.http() as http:
        answer = http.get(f"/v1/arrays/{array_id}/data", headers={"Accept": "application/octet-stream"})
    return np.frombuffer(answer.content, "complex64").reshape(N, N)


def test_a_chain_whose_middle_is_deleted_is_written_at_its_end(data_dir, rng):
    soon = {"GEMMSERVE_WRITE_BACK_DELAY_S": "8"}  # not before the results are there, and their number is known
    with LiveServer(data_dir=data_dir, environment=DEVICE | soon) as server, Client(server.url) as client:
        a = matrix(rng) / 20
        ra = client.put(a)
        hits = metric(server, "device_cache_hits_total")
        spared = metric(server, "write_backs_spared_total")
        square = ra @ ra
        fourth = square @ square
        eighth = fourth @ fourth
        assert metric(server, "device_unwritten_bytes") == 3 * a.nbytes
        assert metric(server, "device_cache_hits_total") >= hits + 4
        square.delete()
        fourth.delete()
        found = eighth.numpy()
        expected = a @ a
        expected = expected @ expected
        np.testing.assert_allclose(found, expected @ expected, rtol=1e-3, atol=1e-3)
        until(lambda: metric(server, "write_backs_spared_total") == spared + 2)
        until(lambda: metric(server, "device_unwritten_bytes") == 0)


def test_how_much_of_the_host_arena_is_registered_is_said_though_nothing_runs(shared):
    until(lambda: metric(shared, "device_registered_bytes") >= 1 << 24)
    assert metric(shared, "device_registered_bytes") <= metric(shared, "host_arena_bytes")


def test_ranges_and_heads_of_what_is_not_written(shared, rng):
    with Client(shared.url) as client, shared.http() as http:
        ra = client.put(matrix(rng))
        result = ra @ ra
        path = f"/v1/arrays/{result.id}/data"
        bare = {"Accept": "application/octet-stream"}
        head = http.head(path, headers=bare)
        assert (head.status_code, head.headers["content-length"]) == (200, str(ra.nbytes))
        assert metric(shared, "device_unwritten_bytes") >= ra.nbytes, "it was not asked for"
        part = http.get(path, headers=bare | {"Range": "bytes=800-1599"})
        assert part.status_code == 206
        assert part.content == result.numpy().tobytes()[800:1600]


def test_checks_batches_and_programs_on_what_is_not_written(shared, rng):
    with Client(shared.url) as client:
        a = matrix(rng)
        ra = client.put(a)
        square = ra @ ra
        job = client.submit("gemm", square, ra, verify=True)
        job.wait(60)
        assert job.info.residual < 1e-5
        square = ra.H @ ra
        batch = client.gemm_many([square, square], [ra, square])
        host = square.numpy()
        np.testing.assert_array_equal(batch[0].numpy() if hasattr(batch[0], "numpy") else batch[0], host @ a)
        square = ra @ ra.H
        with client.program() as program:
            last = program.gemm(square, square) @ ra
        np.testing.assert_allclose(last.numpy(), (a @ a.conj().T) @ (a @ a.conj().T) @ a, rtol=1e-3, atol=1.0)


def test_more_than_may_be_unwritten_is_written(shared, rng):
    with Client(shared.url) as client:
        a = matrix(rng)
        ra = client.put(a)
        most = metric(shared, "device_cache_budget_bytes") / 4
        assert 5 * a.nbytes < most < 20 * a.nbytes
        results = [client.submit("gemm", ra, ra, alpha=alpha).result() for alpha in range(20, 44)]
        assert metric(shared, "device_unwritten_bytes") <= 3 * most
        until(lambda: metric(shared, "device_unwritten_bytes") <= most)
        for alpha, result in enumerate(results, 20):
            np.testing.assert_allclose(result.numpy(), alpha * (a @ a), rtol=1e-4, atol=1e-3)


def test_a_worker_killed_before_it_wrote_takes_nothing_with_it(shared, rng):
    with Client(shared.url) as client:
        a = matrix(rng)
        ra = client.put(a)
        expected = as_written(client, ra, ra)
        before = metric(shared, "results_recomputed_total")
        square = ra @ ra
        other = ra @ square
        unwritten = metric(shared, "device_unwritten_bytes")
        with client.program() as program:
            step = program.gemm(ra, square)
            last = step @ ra
            program.keep(step, last)
        assert metric(shared, "device_unwritten_bytes") == unwritten + 2 * a.nbytes
        ra.delete()
        shared.workers()[0].kill()
        waiting = client.submit("gemm", square, other)
        np.testing.assert_array_equal(square.numpy(), expected)
        np.testing.assert_array_equal(other.numpy(), a @ expected)
        np.testing.assert_array_equal(waiting.result().numpy(), expected @ (a @ expected))
        np.testing.assert_array_equal(last.numpy(), (a @ expected) @ a)
        np.testing.assert_array_equal(step.numpy(), a @ expected)
        assert metric(shared, "results_recomputed_total") == before + 3


def test_a_front_killed_before_it_heard_is_followed_by_one_that_asks_again(shared, rng):
    with Client(shared.url) as client:
        a = matrix(rng)
        ra = client.put(a)
        square = ra @ ra
        front = shared.front()
        front.kill()
        front.wait(60)
        shared.wait_ready()
        np.testing.assert_array_equal(square.numpy(), a @ a)


def test_a_server_killed_before_it_wrote_computes_again_bit_for_bit_and_one_that_ends_writes(start, rng):
    with start() as server, Client(server.url) as client:
        a = matrix(rng)
        ra = client.put(a)
        expected = as_written(client, ra, ra)
        square = ra @ ra
        cube = square @ ra
        ra.delete()
        square.delete()
        assert client.submit("gemm", cube, cube).wait(60)
        server.terminate(signal.SIGKILL)
    with start() as server, Client(server.url) as client:
        np.testing.assert_array_equal(downloaded(server, cube.id), expected @ a)
        until(lambda: metric(server, "results_recomputed_total") == 3)
        until(lambda: metric(server, "array_store_bytes") == 3 * a.nbytes)  # what they were made of has gone
        assert metric(server, "results_recomputed_total") == 3
        ra = client.put(a)
        square = ra @ ra
    with start() as server:
        np.testing.assert_array_equal(downloaded(server, square.id), expected)
        assert metric(server, "results_recomputed_total") == 0


def test_a_result_in_the_host_arena_is_read_there_and_deleted_without_a_file(shared, rng):
    with Client(shared.url) as client:
        a = matrix(rng)
        ra = client.put(a)
        until(lambda: metric(shared, "host_arena_used_bytes") == 0)
        spared = metric(shared, "write_backs_spared_total")
        square = ra @ ra
        found = square.numpy()
        assert metric(shared, "host_arena_used_bytes") >= a.nbytes
        until(lambda: metric(shared, "device_unwritten_bytes") == 0)
        np.testing.assert_array_equal(downloaded(shared, square.id), found)
        again = square @ ra
        np.testing.assert_array_equal(again.numpy(), found @ a)
        again.delete()
        square.delete()
        until(lambda: metric(shared, "write_backs_spared_total") == spared + 2)
        until(lambda: metric(shared, "host_arena_used_bytes") == 0)


SMALL = {
    "GEMMSERVE_HOST_ARENA_BYTES": str(6 << 20),  # eight results
    "GEMMSERVE_DEVICE_CACHE_SHARE": str(20 * 8 * N * N / 144e9),
}


@pytest.mark.parametrize("killed", ["nobody", "worker", "front", "all"])
def test_more_results_than_device_and_arena_hold_and_whoever_is_killed_nothing_is_lost(data_dir, rng, killed):
    environment = DEVICE | SMALL
    with LiveServer(data_dir=data_dir, environment=environment) as server, Client(server.url) as client:
        a = matrix(rng) / 20
        ra = client.put(a)
        expected = as_written(client, ra, ra)
        jobs = [client.submit("gemm", ra, ra, alpha=2.0 ** (number % 4)) for number in range(60)]
        for job in jobs[:30]:
            job.wait(60)
        if killed == "worker":
            server.workers()[0].kill()
        elif killed == "front":
            front = server.front()
            front.kill()
            front.wait(60)
            server.wait_ready()
        results = [job.result().id for job in jobs]
        if killed == "all":
            server.terminate(signal.SIGKILL)
        else:
            for number, array in enumerate(results):
                np.testing.assert_array_equal(downloaded(server, array), 2.0 ** (number % 4) * expected)
    with LiveServer(data_dir=data_dir, environment=environment) as server:
        for number, array in enumerate(results):
            np.testing.assert_array_equal(downloaded(server, array), 2.0 ** (number % 4) * expected)
        if killed != "all":
            assert metric(server, "results_recomputed_total") == 0, "the server that ended has written all"


LARGE = 4096
"""Rows of results of 128 MiB."""


@pytest.mark.slow
def test_a_drain_with_more_than_the_disk_takes_in_its_time_says_so_and_the_next_start_computes_the_rest(data_dir, rng):
    environment = DEVICE | {
        "GEMMSERVE_DEVICE_CACHE_SHARE": str(4e9 / 144e9),
        "GEMMSERVE_HOST_ARENA_BYTES": str(1 << 30),
        "GEMMSERVE_RECYCLE_BYTES": "0",
    }
    count, drain_s = 8, 6
    slow = {"GEMMSERVE_TEST_DISK_RATE": "100e6", "GEMMSERVE_DRAIN_S": str(drain_s)}
    with LiveServer(data_dir=data_dir, environment=environment | slow) as server, Client(server.url) as client:
        column = rng.standard_normal((LARGE, 1)).astype("complex64")
        row = rng.standard_normal((1, LARGE)).astype("complex64")
        left, right = client.put(column), client.put(row)
        jobs = [client.submit("gemm", left, right, alpha=1.0 + number) for number in range(count)]
        results = [job.result().id for job in jobs]
        left.delete()
        right.delete()
        began = time.monotonic()
        server.process.terminate()
        said = []
        with server.http() as http:
            while server.process.poll() is None and "are not written" not in server.text:
                with contextlib.suppress(httpx.TransportError):
                    said.append(http.get("/readyz").text)
                time.sleep(0.1)
        server.wait_end()
        assert time.monotonic() - began < drain_s + 60, "it ends, however much is left"
        assert server.returncode == 0
    assert f"results of {count} jobs, {count * 8 * LARGE**2} bytes, are being written" in server.text
    assert any("computed again by the next start" in text for text in said), said
    left = int(re.search(r"results of (\d+) jobs, \d+ bytes, are not written", server.text)[1])
    assert 0 < left < count
    with LiveServer(data_dir=data_dir, environment=environment) as server, server.http() as http:
        bare = {"Accept": "application/octet-stream"}
        for number, array in enumerate(results):
            expected = (1.0 + number) * (column @ row)
            found = http.get(f"/v1/arrays/{array}/data", headers=bare | {"Range": f"bytes=0-{8 * LARGE - 1}"})
            np.testing.assert_array_equal(np.frombuffer(found.content, "complex64"), expected[0])
            found = http.get(f"/v1/arrays/{array}/data", headers=bare | {"Range": f"bytes=-{8 * LARGE}"})
            np.testing.assert_array_equal(np.frombuffer(found.content, "complex64"), expected[-1])
        assert 0 < metric(server, "results_recomputed_total") <= left
