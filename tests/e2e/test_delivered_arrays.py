"""Arrays that a device copies straight into its client's memory: a real server with a device (the stand-in of
tests/support) and its Unix socket.
"""

from __future__ import annotations

import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import numpy as np
import pytest
from device_server import DEVICE, gated, metric
from gates import Gate
from joined_workers import all_joined
from live_server import LiveServer, until

from gemmserve import Client
from gemmserve._local.memory import find
from gemmserve._local.session import Session
from gemmserve.wire import BY_DEVICE, KEPT, NPY_HEADER, PAGES_HEADER, RESULT_HEADER, SESSION_HEADER

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory is passed on Linux"),
    pytest.mark.skipif(all_joined(), reason="a device of another host has no way to this one's memory"),
]

N = 512
NBYTES = 8 * N * N


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("u") / "g.sock"


@pytest.fixture(scope="module")
def server(tmp_path_factory, path):
    with LiveServer("--uds", str(path), data_dir=tmp_path_factory.mktemp("data"), environment=DEVICE) as live:
        yield live


@pytest.fixture
def client(server, path):
    with Client(f"unix:{path}") as connected:
        yield connected


@pytest.fixture
def rng():
    return np.random.default_rng(46)


def matrix(rng):
    return rng.integers(-9, 10, (N, N)).astype("complex64")  # products are exact


def delivered(server):
    return metric(server, "delivered_bytes_total")


def test_results_that_come_again_and_again_go_straight(server, client, rng):
    a, before = matrix(rng), delivered(server)
    ra = client.put(a)
    unwritten = metric(server, "device_unwritten_bytes")
    addresses = set()
    for number in range(4):
        result = ra @ client.put(np.eye(N, dtype="complex64") * (number + 1))
        found = result.numpy()
        np.testing.assert_array_equal(found, a * (number + 1))
        assert found.flags.writeable
        addresses.add(find(found)[0].address)
        del found
        gc.collect()
    assert len(addresses) == 1, "the client uses its memory again"
    assert delivered(server) == before + 3 * NBYTES
    # The first came by way of the host arena; the others are on the device alone as they were.
    until(lambda: metric(server, "device_unwritten_bytes") == unwritten + 3 * NBYTES)


def test_operands_that_the_device_has_go_straight(server, client, rng):
    a = matrix(rng)
    ra = client.put(a)
    (ra @ ra).delete()
    before = delivered(server)

    def fetch():
        np.testing.assert_array_equal(ra.numpy(), a)
        gc.collect()
        return delivered(server) >= before + 2 * NBYTES

    until(fetch)  # once the front has heard that the device has a copy


def test_results_that_are_held_are_not_written_over(server, client, rng):
    a, before = matrix(rng), delivered(server)
    ra = client.put(a)
    products = [ra @ client.put(np.eye(N, dtype="complex64") * factor) for factor in range(1, 7)]
    for _ in range(3):
        found = [product.numpy() for product in products]
        for factor, each in enumerate(found, 1):
            np.testing.assert_array_equal(each, a * factor)
            each[:] = 0  # the client's own
        assert len({find(each)[0].address for each in found}) == 6
        del each, found
        gc.collect()
    assert delivered(server) >= before + 12 * NBYTES
    for product, factor in zip(products, range(1, 7), strict=True):
        np.testing.assert_array_equal(product.numpy(), a * factor)


def test_orders_and_shapes(client, rng):
    """Which memory holds which array has nothing to do with what they look like."""
    a, b = (rng.integers(-9, 10, (700, 600)).astype("complex64") for _ in range(2))
    ra, rb = client.put(np.asfortranarray(a)), client.put(b)
    batch = client.put(rng.integers(-9, 10, (3, 300, 300)).astype("complex64"))
    for _ in range(3):
        for handle, expected in [
            (client.gemm(ra, rb, trans_b="T"), a @ b.T),
            (client.gemm(ra, rb, trans_a="T"), a.T @ b),
            (batch @ batch, batch.numpy() @ batch.numpy()),
        ]:
            found = handle if isinstance(handle, np.ndarray) else handle.numpy()
            np.testing.assert_array_equal(found, expected)
            del found
            gc.collect()


@pytest.mark.parametrize("promised", [True, False])
def test_only_memory_whose_pages_stay_is_handed_to_a_device(server, path, client, rng, promised):
    a = matrix(rng)
    result = client.put(a) @ client.put(np.eye(N, dtype="complex64"))
    before = delivered(server)
    session = Session(f"{path}.fds", None)
    fd = os.memfd_create("peer", os.MFD_CLOEXEC)
    os.pwrite(fd, bytes(NBYTES), 0)
    with server.http() as http:
        for number in range(2):
            os.pwrite(fd, bytes(NBYTES), 0)
            headers = {SESSION_HEADER: session.secret, RESULT_HEADER: str(session.send(fd)), "Accept": "*/*"}
            if promised:
                headers[PAGES_HEADER] = KEPT
            answer = http.get(f"/v1/arrays/{result.id}/data", headers=headers)
            assert answer.status_code == 200
            assert answer.headers["content-type"] == NPY_HEADER, number
            assert (answer.headers[RESULT_HEADER] == BY_DEVICE) == (promised and number == 1)
            assert os.pread(fd, NBYTES, 0) == a.tobytes()
    os.close(fd)
    session.close()
    assert delivered(server) == before + promised * NBYTES


def test_many_clients_at_once(server, path, rng):
    a = matrix(rng)

    def run(factor):
        with Client(f"unix:{path}") as client:
            ra, rb = client.put(a), client.put(np.eye(N, dtype="complex64") * factor)
            for _ in range(10):
                result = ra @ rb
                found = result.numpy()
                np.testing.assert_array_equal(found, a * factor)
                result.delete()
                del found
            return client.usage() is not None

    before = delivered(server)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(1, 9)))
    assert delivered(server) > before


@contextmanager
def standing(tmp_path, **settings):
    """A server whose worker can be held before it copies an array to a client; its gate, and a client."""
    gate = Gate(tmp_path / "gate", "GEMMSERVE_TEST_DELIVERY_GATE")
    path = tmp_path / "g.sock"
    with (
        LiveServer("--uds", str(path), data_dir=tmp_path / "data", environment=gated(gate) | settings) as live,
        Client(f"unix:{path}") as client,
    ):
        try:
            yield live, gate, client
        finally:
            gate.open()


def test_a_worker_that_is_killed_meanwhile(tmp_path, rng):
    """The client is left without an answer, which would say that its memory is free; the result is computed again."""
    a = matrix(rng)
    with standing(tmp_path) as (server, gate, client), ThreadPoolExecutor(1) as pool:
        ra = client.put(a)
        first = ra @ client.put(np.eye(N, dtype="complex64") * 2)
        np.testing.assert_array_equal(first.numpy(), a * 2)
        gc.collect()
        second = ra @ client.put(np.eye(N, dtype="complex64") * 3)
        gate.shut(0)
        asked = pool.submit(second.numpy)
        gate.wait_reached()
        assert not asked.done()
        (worker,) = server.workers()
        worker.kill()
        gate.open()
        np.testing.assert_array_equal(asked.result(60), a * 3)
        del asked
        gc.collect()
        assert metric(server, "results_recomputed_total") >= 1
        assert "a connection is closed without an answer" in server.text
        third = ra @ client.put(np.eye(N, dtype="complex64") * 4)
        np.testing.assert_array_equal(third.numpy(), a * 4)


def _answers(http):
    try:
        return http.get("/livez").status_code == 200
    except httpx.TransportError:
        return False


def test_a_front_that_is_killed_meanwhile(tmp_path, rng):
    """Another front answers the client's next try, when nothing of the first one's is under way any more."""
    a = matrix(rng)
    with standing(tmp_path) as (server, gate, client), ThreadPoolExecutor(1) as pool:
        ra = client.put(a)
        for factor in (2, 3):
            result = ra @ client.put(np.eye(N, dtype="complex64") * factor)
            if factor == 2:
                np.testing.assert_array_equal(result.numpy(), a * 2)
                gc.collect()
        gate.shut(0)
        asked = pool.submit(result.numpy)
        gate.wait_reached()
        server.front().kill()
        with server.http() as http:
            until(lambda: _answers(http))
            time.sleep(1)
            assert http.get("/readyz").status_code == 503, "the worker has gone on to the next front"
        gate.open()
        np.testing.assert_array_equal(asked.result(60), a * 3)


def test_a_worker_that_stands_costs_the_client_its_memory_and_nothing_else(tmp_path, rng):
    """The server breaks the connection rather than say that the memory is free; the array comes another way."""
    a = matrix(rng)
    with (
        standing(tmp_path, GEMMSERVE_ONESHOT_TIMEOUT_S="1") as (server, gate, client),
        ThreadPoolExecutor(1) as pool,
    ):
        ra = client.put(a)
        (ra @ client.put(np.eye(N, dtype="complex64"))).numpy()
        gc.collect()
        result = ra @ client.put(np.eye(N, dtype="complex64") * 7)
        gate.shut(0)
        found = pool.submit(result.numpy).result(60)
        np.testing.assert_array_equal(found, a * 7)
        found[:] = 0
        gate.open()
        other = ra @ client.put(np.eye(N, dtype="complex64") * 8)
        for _ in range(3):
            np.testing.assert_array_equal(other.numpy(), a * 8)
            gc.collect()
        assert delivered(server) > 0, "so that what stood is over"
        assert not found.any(), "written to after it was the client's"


def test_no_answer_has_a_status_while_the_device_may_still_write(tmp_path, rng):
    a = matrix(rng)
    with standing(tmp_path, GEMMSERVE_ONESHOT_TIMEOUT_S="1") as (server, gate, client):
        result = client.put(a) @ client.put(np.eye(N, dtype="complex64"))
        session = Session(f"{tmp_path / 'g.sock'}.fds", None)
        fd = os.memfd_create("peer", os.MFD_CLOEXEC)
        os.pwrite(fd, bytes(NBYTES), 0)
        with server.http() as http:
            for wanted in (None, "sha-256=1"):
                for stands in (False, True):
                    headers = {SESSION_HEADER: session.secret, RESULT_HEADER: str(session.send(fd)), PAGES_HEADER: KEPT}
                    if wanted:
                        headers["Want-Content-Digest"] = wanted
                    if not stands:
                        assert http.get(f"/v1/arrays/{result.id}/data", headers=headers).status_code == 200
                        continue
                    gate.shut(0)
                    with pytest.raises(httpx.RemoteProtocolError):
                        http.get(f"/v1/arrays/{result.id}/data", headers=headers)
                    gate.open()
        os.close(fd)
        session.close()


def test_a_result_by_way_of_the_store_is_frozen_where_it_lies(client, rng):
    result = client.put(matrix(rng)) @ client.put(np.eye(N, dtype="complex64"))
    found = result.numpy()
    fd = find(found)[0].fd
    frozen = client.freeze(found)
    assert find(frozen)[0].sealed
    assert os.fstat(find(frozen)[0].fd).st_ino == os.fstat(fd).st_ino


def test_results_are_frozen_though_their_memory_was_handed_to_the_device(server, client, rng):
    a, before = matrix(rng), delivered(server)
    ra, eye = client.put(a), client.put(np.eye(N, dtype="complex64"))
    for _ in range(3):
        found = None
        gc.collect()
        found = [(ra @ eye).numpy() for _ in range(2)]
    assert delivered(server) == before + 4 * NBYTES
    frozen = client.freeze(found[0])
    assert not frozen.flags.writeable
    assert find(frozen)[0].sealed
    np.testing.assert_array_equal(client.gemm(frozen, np.eye(N, dtype="complex64") * 2), a * 2)
    found = None
    gc.collect()
    # As many as the client has blocks, and none of them in memory that the worker has mapped.
    for empty in [client.empty((N, N), "complex64") for _ in range(6)]:
        empty[:] = a
        lies = os.fstat(find(empty)[0].fd).st_ino
        frozen = client.freeze(empty)
        assert find(frozen)[0].sealed
        assert os.fstat(find(frozen)[0].fd).st_ino == lies, "it is not copied"


def test_an_array_that_is_deleted_meanwhile(tmp_path, rng):
    a = matrix(rng)
    with standing(tmp_path) as (server, gate, client), ThreadPoolExecutor(1) as pool:
        ra = client.put(a)
        (ra @ client.put(np.eye(N, dtype="complex64"))).numpy()
        gc.collect()
        result = ra @ client.put(np.eye(N, dtype="complex64") * 5)
        gate.shut(0)
        asked = pool.submit(result.numpy)
        gate.wait_reached()
        client.delete(result.id)
        gate.open()
        np.testing.assert_array_equal(asked.result(60), a * 5)
        assert delivered(server) == NBYTES
        until(lambda: metric(server, "device_unwritten_bytes") == 0)
