"""Results that are being written while somebody asks for them, or for something else: a real server with a device (the
stand-in of tests/support), held in the middle of the writing.
"""

from __future__ import annotations

import contextlib
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
from device_server import Asked, downloaded, gated, metric
from gates import Gate
from joined_workers import all_joined
from live_server import LiveServer, until

from gemmserve import Client

pytestmark = pytest.mark.skipif(all_joined(), reason="results of workers that joined come by another way")

SHAPE = 3072, 4096
"""A result that a device writes in three turns, and that goes from the host arena to its file in twelve."""
TURNS = 2
"""Turns after which it stands: the first of them is over then."""
NBYTES = 8 * SHAPE[0] * SHAPE[1]
SOON = {"GEMMSERVE_WRITE_BACK_DELAY_S": "0", "GEMMSERVE_ONESHOT_TIMEOUT_S": "60"}
"""The writing of a result begins by itself; who waits in vain is told so."""
NO_ARENA = {"GEMMSERVE_HOST_ARENA_BYTES": "0"}


@pytest.fixture
def rng():
    return np.random.default_rng(39)


@dataclass
class Gates:
    """Where a worker stands before it writes a piece of a result, and a front before it copies a piece of one from the
    host arena to its file."""

    write: Gate
    spill: Gate

    @classmethod
    def below(cls, folder):
        """Return gates whose files are there."""
        return cls(
            Gate(folder / "write", "GEMMSERVE_TEST_WRITE_GATE"), Gate(folder / "spill", "GEMMSERVE_TEST_SPILL_GATE")
        )

    @contextlib.contextmanager
    def opened(self):
        """Opens them in the end, whatever happens: a server that stands there would not end by SIGTERM."""
        try:
            yield self
        finally:
            self.write.open()
            self.spill.open()


@contextlib.contextmanager
def standing(folder, settings):
    """A server with gates."""
    gates = Gates.below(folder)
    environment = gated(gates.write, gates.spill) | SOON | settings
    with LiveServer(data_dir=folder / "data", environment=environment) as live, gates.opened():
        yield live, gates


@pytest.fixture(scope="module", params=[{}, NO_ARENA], ids=["by the arena", "to its file"])
def shared(request, tmp_path_factory):
    """A server of several tests, and its gates."""
    with standing(tmp_path_factory.mktemp("standing"), request.param) as found:
        yield found


@pytest.fixture(scope="module")
def with_arena(tmp_path_factory):
    """Likewise, by whose host arena results go."""
    with standing(tmp_path_factory.mktemp("standing"), {}) as found:
        yield found


def large(client, rng):
    """A product of that shape by the client, and its bits."""
    column = rng.integers(-1000, 1000, (SHAPE[0], 1)).astype("complex64")
    row = rng.integers(-1000, 1000, (1, SHAPE[1])).astype("complex64")
    return client.put(column) @ client.put(row), column * row  # exact: every element is a small integer


def matrix(rng, n):
    return (rng.integers(-8, 9, (n, n)) + 1j * rng.integers(-8, 9, (n, n))).astype("complex64")


PARTS = None, (0, 4096), (NBYTES - 4096, NBYTES)
"""What is asked for: all, of what is written, of what is not."""


def check(server, result, expected):
    """Compare what is downloaded of a result, and again once it is in its file, where it stays."""
    np.testing.assert_array_equal(downloaded(server, result.id, SHAPE), expected)
    until(lambda: metric(server, "device_unwritten_bytes") == metric(server, "host_arena_used_bytes") == 0)
    np.testing.assert_array_equal(downloaded(server, result.id, SHAPE), expected)


def kill(process):
    process.kill()
    process.wait(60)


def computes_with(client, result, expected):
    """Compute with a result, wherever it is."""
    sums = client.gemm_reduce(np.ones((1, SHAPE[0]), "complex64"), result, reduce="sum", axis="m")
    np.testing.assert_allclose(sums, expected.sum(axis=0), rtol=1e-5, atol=1)


def test_what_is_asked_for_in_the_middle_of_its_write_back_is_whole(shared, rng):
    server, gates = shared
    with gates.opened(), Client(server.url) as client:
        recomputed = metric(server, "results_recomputed_total")
        gates.write.shut(after=TURNS)
        result, expected = large(client, rng)
        gates.write.wait_reached()  # two thirds of it are written
        asked = [Asked(server, result.id, part) for part in PARTS]
        with server.http() as http:
            head = http.head(f"/v1/arrays/{result.id}/data", headers={"Accept": "application/octet-stream"})
        assert head.headers["content-length"] == str(NBYTES)
        computes_with(client, result, expected)
        assert metric(server, "device_unwritten_bytes") == NBYTES
        assert not any(each.answered for each in asked)
        gates.write.open()
        for part, each in zip(PARTS, asked, strict=True):
            assert each.bytes() == expected.tobytes()[slice(*part or (None,))]
        check(server, result, expected)
        assert metric(server, "results_recomputed_total") == recomputed


@pytest.mark.parametrize("killed", ["worker", "front"])
def test_who_is_killed_in_the_middle_of_a_write_back_leaves_no_half_a_result(shared, rng, killed):
    server, gates = shared
    with gates.opened(), Client(server.url) as client:
        recomputed = metric(server, "results_recomputed_total")
        gates.write.shut(after=TURNS)
        result, expected = large(client, rng)
        gates.write.wait_reached()
        asked = Asked(server, result.id)
        kill(server.workers()[0] if killed == "worker" else server.front())
        gates.write.open()
        if killed == "worker":
            assert asked.bytes() == expected.tobytes()
            assert metric(server, "results_recomputed_total") == recomputed + 1
        else:
            server.wait_ready()
        check(server, result, expected)


def test_a_server_killed_in_the_middle_of_a_write_back_leaves_no_half_a_result(tmp_path, rng):
    with standing(tmp_path, NO_ARENA) as (server, gates), Client(server.url) as client:
        gates.write.shut(after=TURNS)
        result, expected = large(client, rng)
        gates.write.wait_reached()
        server.terminate(signal.SIGKILL)
    with standing(tmp_path, NO_ARENA) as (server, _):
        check(server, result, expected)


@pytest.mark.parametrize("killed", ["nobody", "front"])
def test_what_is_asked_for_on_its_way_from_the_arena_to_its_file_is_whole(with_arena, rng, killed):
    server, gates = with_arena
    with gates.opened(), Client(server.url) as client:
        gates.spill.shut(after=3)
        result, expected = large(client, rng)
        gates.spill.wait_reached()  # a quarter of it is in the file
        assert metric(server, "device_unwritten_bytes") == 0
        for part in PARTS:  # at once
            assert Asked(server, result.id, part).bytes() == expected.tobytes()[slice(*part or (None,))]
        computes_with(client, result, expected)
        assert metric(server, "host_arena_used_bytes") >= NBYTES
        if killed == "front":
            kill(server.front())
        gates.spill.open()
        if killed == "front":
            server.wait_ready()
        check(server, result, expected)


def test_a_server_killed_with_half_a_result_in_its_file_does_not_show_that(tmp_path, rng):
    with standing(tmp_path, {}) as (server, gates), Client(server.url) as client:
        gates.spill.shut(after=3)
        result, expected = large(client, rng)
        gates.spill.wait_reached()
        server.terminate(signal.SIGKILL)
    with standing(tmp_path, {}) as (server, _):
        check(server, result, expected)


def test_small_products_do_not_wait_for_a_write_back_that_is_under_way(with_arena, rng):
    """Single requests, jobs whose results are written at once and jobs whose results stay on the device, batches,
    programs: all end while another result is being written, with whoever writes it standing still.
    """
    server, gates = with_arena
    with gates.opened(), Client(server.url) as client:
        small, mid = matrix(rng, 24), matrix(rng, 200)
        rs, rm = client.put(small), client.put(mid)
        gates.write.shut(after=TURNS)
        result, expected = large(client, rng)
        gates.write.wait_reached()
        asked = Asked(server, result.id)  # and somebody waits for it
        with ThreadPoolExecutor(4) as pool:
            single = list(pool.map(lambda alpha: client.gemm(small, small, alpha=alpha), range(1, 9)))
        jobs = {(r.shape[0], alpha): client.submit("gemm", r, r, alpha=alpha) for r in (rs, rm) for alpha in (1, 2)}
        for (n, alpha), job in jobs.items():
            assert job.wait(60).state == "succeeded", (n, alpha)
        batch = client.gemm_many([small] * 5, small)
        with client.program() as program:
            fourth = program.gemm(program.gemm(rs, rs), rs)
        cube = fourth.numpy()
        found = jobs[24, 2].result().numpy()
        # Until here none of it has waited.
        assert not asked.answered
        assert metric(server, "device_unwritten_bytes") >= NBYTES
        gates.write.open()
        assert asked.bytes() == expected.tobytes()
        for alpha, each in enumerate(single, 1):
            np.testing.assert_array_equal(each, alpha * (small @ small))
        for each in batch:
            np.testing.assert_array_equal(each, small @ small)
        np.testing.assert_array_equal(cube, small @ small @ small)
        np.testing.assert_array_equal(found, 2 * (small @ small))
        np.testing.assert_array_equal(jobs[200, 2].result().numpy(), 2 * (mid @ mid))
