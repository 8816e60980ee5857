"""Both clients on a Unix socket: what goes by shared memory, that it is right, and how they do without."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from local_app import LocalApp
from works import unpacked

import gemmserve
from gemmserve import AsyncClient, Client, _base
from gemmserve._calls import arrays
from gemmserve._local import memory as _local_memory
from gemmserve._local import session
from gemmserve._local.memory import find
from gemmserve._transport import connection
from gemmserve_service.tenancy.keyring import create_key

pytestmark = pytest.mark.skipif(not _local_memory.supported(), reason="shared memory is passed on Linux")

N = 256  # of complex64: 512 KiB an array


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("s")
    with LocalApp(folder / "g.sock", folder / "data") as app:
        yield app


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A server that stands still for a while is no reason to do without shared memory here."""
    monkeypatch.setattr(session, "_TIMEOUT_S", 60.0)


@pytest.fixture
def app(running):
    running.executor.release()  # should a test before have failed
    running.executor.sent.clear()
    yield running
    running.until(lambda: running.descriptors.sessions == running.descriptors.held == 0)
    running.until(lambda: running.core.store.scratch_bytes == 0)


@pytest.fixture
def make(tmp_path_factory, tmp_path):
    apps = []

    def start(**options):
        app = LocalApp(tmp_path_factory.mktemp("s") / "g.sock", tmp_path / "data", **options)
        apps.append(app)
        return app.__enter__()

    yield start
    for app in apps:
        app.__exit__(None)


class Sent:
    """Counts the bytes of bodies in either direction."""

    def __init__(self, monkeypatch) -> None:
        self.up = 0
        self.refused = 0
        inner = gemmserve._transport.connection.Connection._sent

        def count(connection, body, label):
            self.up += body.nbytes
            return inner(connection, body, label)

        monkeypatch.setattr(gemmserve._transport.connection.Connection, "_sent", count)


@pytest.fixture
def sent(monkeypatch):
    return Sent(monkeypatch)


@pytest.fixture
def operands(random_complex):
    return random_complex(N, N), random_complex(N, N), random_complex(N, N)


def check(d, a, b, c) -> None:
    np.testing.assert_allclose(d, 2 * (a @ b) + 1j * c, rtol=1e-3, atol=1e-3)


def test_a_product_sends_no_array(app, sent, operands) -> None:
    a, b, c = operands
    with Client(app.url) as client:
        d = client.gemm(a, b, c, alpha=2, beta=1j)
        check(d, a, b, c)
        assert sent.up < 4096
        assert find(d) is not None, "the result lies in shared memory"
        assert d.flags.writeable
        d[:] = 0
        e = client.gemm(d, b)  # a result is passed on without a copy
        assert not e.any()
    assert np.array_equal(d, np.zeros((N, N)))  # it outlives the client


def test_views_are_fetched_by_the_socket(app, operands) -> None:
    a, _, _ = operands
    with Client(app.url) as client:
        remote = client.put(a)
        np.testing.assert_array_equal(remote[3:200, ::-1].numpy(), a[3:200, ::-1])
        np.testing.assert_array_equal(remote[:, 3].numpy(), a[:, 3])
        np.testing.assert_array_equal(remote.T.conj().numpy(), a.T.conj())
        remote.delete()


async def test_the_same_awaited(app, sent, operands) -> None:
    a, b, c = operands
    async with AsyncClient(app.url) as client:
        check(await client.gemm(a, b, c, alpha=2, beta=1j), a, b, c)
        remote = await client.put(a)
        np.testing.assert_array_equal(await remote.numpy(), a)
        x = client.empty(a.shape, a.dtype)
        x[:] = a
        check(await client.gemm(client.freeze(x), b, c, alpha=2, beta=1j), a, b, c)
    assert sent.up < 8192


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("layout", ["C", "F", "strided", "big-endian"])
def test_layouts(app, sent, rng, layout, order) -> None:
    base = rng.standard_normal((2 * N, N))
    array = {
        "C": base, "F": np.asfortranarray(base), "strided": base[::2, ::-1], "big-endian": base.astype(">f8"),
    }[layout]  # fmt: skip
    with Client(app.url) as client:
        d = client.gemm(array, np.eye(N) * 2, order=order)
        assert d.flags.f_contiguous == (order == "F")
        assert d.dtype == np.float64
        np.testing.assert_array_equal(d, array * 2)
        with client.put(array, digest=True) as remote:
            assert remote.info.order == ("F" if layout == "F" else "C")
            np.testing.assert_array_equal(remote.numpy(), array)
    assert sent.up < 8192


def test_planar_batches_and_broadcasting(app, rng) -> None:
    a, b = rng.standard_normal((2, 3, 1, 70, 60)), rng.standard_normal((2, 4, 60, 80))
    with Client(app.url) as client:
        d = client.gemm(a, b, layout="planar")
    wanted = (a[0] + 1j * a[1]) @ (b[0] + 1j * b[1])
    np.testing.assert_allclose(d[0] + 1j * d[1], wanted, rtol=1e-10, atol=1e-10)


def test_small_arrays_go_by_the_socket(app, sent) -> None:
    with Client(app.url) as client:
        np.testing.assert_array_equal(client.gemm(np.eye(4), np.eye(4)), np.eye(4))
        assert app.descriptors.sessions == 0
    assert sent.up > 256


def test_large_and_small_together(app, sent, operands) -> None:
    a, _, _ = operands
    with Client(app.url) as client:
        d = client.gemm(a, np.ones((N, 1), np.complex64))
        assert d.shape == (N, 1)
    np.testing.assert_allclose(d[:, 0], a.sum(1), rtol=1e-3, atol=1e-3)
    assert N * 8 < sent.up < 2 * N * 8


def test_reductions(app, sent, operands) -> None:
    a, b, _ = operands
    with Client(app.url) as client:
        found = client.gemm_reduce(a, b, reduce=["sum", "absmax"])
        np.testing.assert_allclose(found["sum"], (a @ b).sum(0), rtol=1e-2, atol=1e-2)
        both = client.gemm_reduce(a, b, return_c=True)
        np.testing.assert_allclose(both["c"], a @ b, rtol=1e-3, atol=1e-3)
    assert sent.up < 8192


def test_what_is_frozen_is_used_where_it_lies_again_and_again(app, operands) -> None:
    a, b, c = operands
    with Client(app.url) as client:
        frozen = client.freeze(a)
        for _ in range(2):
            check(client.gemm(frozen, b, c, alpha=2, beta=1j), a, b, c)
    app.until(lambda: app.core.store.scratch_bytes == 0)
    runs = [run for batch in app.executor.sent for run in unpacked(batch)]
    assert len(runs) == 2
    for run in runs:
        assert run.operands["a"].capacity == a.nbytes
        assert run.operands["a"].path not in {e.path for e in tuple(app.core.store._memory._free.values())}


def test_what_is_not_frozen_may_be_filled_anew(app, operands) -> None:
    a, b, c = operands
    with Client(app.url) as client:
        x = client.empty(a.shape, a.dtype, "F")
        for factor in (1, 2):
            x[:] = a * factor
            check(client.gemm(x, b, c, alpha=2, beta=1j), a * factor, b, c)


def test_memory_for_the_next_product(app, operands) -> None:
    a, b, c = operands
    with Client(app.url) as client:
        kept = client.gemm(a, b, c, alpha=2, beta=1j)
        first = find(kept)[0].address
        again = client.gemm(b, a, c, alpha=2, beta=1j)
        assert find(again)[0].address != first, "a result that is held is never written again"
        check(kept, a, b, c)
        del kept, again
        app.until(lambda: app.core.store.scratch_bytes == 0)
        before = _memory()
        for _ in range(3):
            check(client.gemm(a, b, c, alpha=2, beta=1j), a, b, c)
        app.until(lambda: _memory() == before)
        assert client._io.shared.pool.kept_bytes <= 5 * a.nbytes


def _memory() -> int:
    """Descriptors of clients' memory that this process has open, on either side."""
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            count += "memfd:gemmserve-client" in str(path.readlink())
    return count


def test_arrays_beyond_the_limit_go_by_the_socket(app, sent, operands) -> None:
    a, b, c = operands
    with Client(app.url) as client:
        pool = client._io.shared.pool
        pool.limit = 4 * a.nbytes
        held = [client.gemm(a, b, c, alpha=2, beta=1j) for _ in range(4)]
        for each in held:
            check(each, a, b, c)
        assert [find(each) is not None for each in held] == [True, False, False, False]
        assert sent.up < 8192, "the operands' memory serves again"
        pool.limit = 0
        check(client.gemm(client.freeze(a), b, c, alpha=2, beta=1j), a, b, c)
        np.testing.assert_array_equal(client.put(a).numpy(), a)
        assert sent.up > 3 * a.nbytes


@pytest.mark.parametrize("what", ["operands", "results"])
def test_what_is_too_large_goes_by_the_socket(app, sent, operands, what, monkeypatch) -> None:
    a, b, c = operands
    largest = "MAX_OPERAND_BYTES" if what == "operands" else "MAX_RESULT_BYTES"
    with Client(app.url) as client:
        for limit in (a.nbytes, a.nbytes - 1):
            monkeypatch.setattr(session, largest, limit)
            before = sent.up
            result = client.gemm(a, b, c, alpha=2, beta=1j)
            check(result, a, b, c)
            assert (sent.up > before + 3 * a.nbytes) == (what == "operands" and limit < a.nbytes)
            assert (find(result) is None) == (what == "results" and limit < a.nbytes)


@pytest.fixture
def small_parts(monkeypatch):
    """Arrays go in parts from 4 KiB on, of 1 KiB each, and there are processors for it."""
    monkeypatch.setattr(_base, "pays_on_one_host", lambda: True)
    for module, name, size in (
        (arrays, "PARTS_FROM", 4096), (arrays, "PART", 1024), (connection, "PARTS_FROM", 4096),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, size)


def asked_for(client, action):
    """What `action()` returns, and the requests that it took, by method and the end of their paths."""
    seen, send = [], client._io._exchange

    def exchange(request, *rest):
        seen.append((request.method, request.path.rpartition("/")[2]))
        return send(request, *rest)

    client._io._exchange = exchange
    try:
        return action(), seen
    finally:
        client._io._exchange = send


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("processors", ["many", "few"])
def test_what_does_not_go_by_shared_memory_goes_in_parts(app, operands, monkeypatch, processors) -> None:
    a, *_ = operands
    monkeypatch.setattr(_base, "pays_on_one_host", lambda: processors == "many")
    with Client(app.url) as client:
        shared = client.empty(a.shape, a.dtype)
        shared[...] = a
        for limit, array, in_parts in ((a.nbytes, a, False), (a.nbytes - 1, shared, False), (a.nbytes - 1, a, True)):
            monkeypatch.setattr(session, "MAX_OPERAND_BYTES", limit)
            handle, seen = asked_for(client, lambda array=array: client.put(array))
            assert (("POST", "uploads") in seen) == (in_parts and processors == "many")
        for limit, in_parts in ((a.nbytes, False), (a.nbytes - 1, True)):
            monkeypatch.setattr(session, "MAX_RESULT_BYTES", limit)
            found, seen = asked_for(client, handle.numpy)
            np.testing.assert_array_equal(found, a)
            assert (len(seen) > 1) == (in_parts and processors == "many")
            assert (find(found) is None) == in_parts
        monkeypatch.setattr(session, "MAX_RESULT_BYTES", a.nbytes)
        monkeypatch.setattr(session, "MAX_OPERAND_BYTES", a.nbytes)
        pool = client._io.shared.pool
        pool.limit = 0
        assert pool.kept_bytes == 0, "what waits is more than that, and goes"
        _, seen = asked_for(client, lambda: client.put(a))
        assert (("POST", "uploads") in seen) == (processors == "many"), "there is no room for a copy"
        small = client.put(a[0, :1])
        assert len(asked_for(client, small.numpy)[1]) == 1
        pool.limit = a.nbytes
        held, _ = asked_for(client, handle.numpy)
        again, seen = asked_for(client, handle.numpy)
        assert find(held) is not None
        assert (len(seen) > 1) == (processors == "many"), "there is no more room"
        np.testing.assert_array_equal(again, a)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("why", ["none", "refused", "lost"])
def test_without_shared_memory_large_arrays_go_in_parts(make, app, operands, monkeypatch, why) -> None:
    a, *_ = operands
    now = [1000.0]
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with Client((make(descriptors=False) if why == "none" else app).url) as client:
        shared = client._io.shared
        if why == "none":
            for pause in (1, 2, 4, 8, 8):
                client.put(a)  # finds that there is no such socket
                now[0] += pause - 0.5
                assert not shared.takes_operand(a)
                assert not shared.takes_result(a.nbytes)
                now[0] += 1
                assert shared.takes_operand(a)
            client.put(a)
        else:
            client.put(a)
        if why == "refused":
            shared._closed = True
        if why == "lost":
            shared._lost(shared._session, OSError("gone"))
        handle, seen = asked_for(client, lambda: client.put(a))
        assert ("POST", "uploads") in seen
        found, seen = asked_for(client, handle.numpy)
        np.testing.assert_array_equal(found, a)
        assert len(seen) > 1


def test_errors_are_those_of_any_way(app, operands) -> None:
    a, b, _ = operands
    with Client(app.url) as client:
        with pytest.raises(gemmserve.ComputeUnsupported):
            client.gemm(a.real.astype(float), b.real.astype(float), compute="tf32")
        with pytest.raises(gemmserve.NotFound):
            client.get("arr_00000000000000000000000000")
        app.executor.hold = True
        with pytest.raises(gemmserve.JobTimeout):
            client.gemm(a, b, timeout=0.3)
        app.executor.release()
        np.testing.assert_allclose(client.gemm(a, b), a @ b, rtol=1e-3, atol=1e-3)


def test_memory_of_an_exchange_that_broke_is_not_used_again(app, operands, monkeypatch) -> None:
    a, b, _ = operands
    with Client(app.url, timeout=0.5, retry=gemmserve.RetryPolicy(attempts=1)) as client:
        monkeypatch.setattr("gemmserve._calls.requests.ONE_SHOT_WAIT_S", 0.0)
        app.executor.hold = True
        with pytest.raises(gemmserve.TransportTimeout):
            client.gemm(a, b)
        assert client._io.shared.pool.kept_bytes == 0
    app.executor.release()


def test_threads_share_a_client(app, random_complex) -> None:
    arrays = [random_complex(N, N) for _ in range(6)]
    failures = []
    with Client(app.url) as client:

        def work(array) -> None:
            wrong = [
                1 for _ in range(3) if not np.array_equal(client.gemm(array, np.eye(N, dtype=np.complex64)), array)
            ]
            failures.extend(wrong)

        threads = [threading.Thread(target=work, args=(array,)) for array in arrays]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert app.descriptors.sessions == 1
    assert failures == []


# -- without --------------------------------------------------------------------------------------------------------


def test_a_server_that_offers_none(make, sent, operands, caplog) -> None:
    a, b, c = operands
    app = make(descriptors=False)
    with caplog.at_level(logging.INFO, "gemmserve"), Client(app.url) as client:
        for _ in range(2):
            check(client.gemm(a, b, c, alpha=2, beta=1j), a, b, c)
    assert sent.up > 2 * 3 * a.nbytes
    said = [record.message for record in caplog.records if record.name == "gemmserve"]
    assert len(said) == 1
    assert "through the socket" in said[0]


@pytest.mark.parametrize("answer", [b"", b"{", b"[]", b'{"kind": "welcome"}', b'{"kind": "refused"}'])
def test_a_server_that_speaks_otherwise(app, tmp_path_factory, operands, answer) -> None:
    a, b, c = operands
    folder = tmp_path_factory.mktemp("s")
    (folder / "g.sock").symlink_to(app.path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as odd:
        odd.bind(str(folder / "g.sock.fds"))
        odd.listen()

        def serve() -> None:
            connection, _ = odd.accept()
            connection.recv(1000)
            if answer:
                connection.send(answer)
            connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with Client(f"unix:{folder}/g.sock") as client:
            check(client.gemm(a, b, c, alpha=2, beta=1j), a, b, c)
        thread.join(60)


def test_a_session_that_was_lost_costs_an_exchange_not_the_product(app, sent, operands, monkeypatch) -> None:
    a, b, c = operands
    monkeypatch.setattr(session, "_PAUSE_S", 0.0)
    with Client(app.url) as client:
        check(client.gemm(a, b, c, alpha=2, beta=1j), a, b, c)
        app.end_sessions()
        check(client.gemm(a, b, c, alpha=2, beta=1j), a, b, c)  # by the socket
        assert sent.up > a.nbytes
        sent.up = 0
        check(client.gemm(a, b, c, alpha=2, beta=1j), a, b, c)  # by a session of its own again
        assert sent.up < 4096


def test_refusals_do_not_go_on_for_ever(make, sent, operands, monkeypatch) -> None:
    a, b, c = operands
    monkeypatch.setattr(session, "_PAUSE_S", 0.0)
    app = make(max_shared_descriptors=0)
    with Client(app.url) as client:
        for _ in range(session._MAX_REFUSALS):
            check(client.gemm(a, b, c, alpha=2, beta=1j), a, b, c)
        assert not client._io.shared.worth(gemmserve._calls.requests.put_array(a))
        check(client.gemm(a, b, c, alpha=2, beta=1j), a, b, c)


def test_no_memory_for_arrays(app, sent, operands, monkeypatch) -> None:
    a, b, c = operands

    def refuse(*_):
        raise OSError(24, "Too many open files")

    with Client(app.url) as client:
        monkeypatch.setattr(_local_memory.os, "memfd_create", refuse)
        assert client.empty(3).shape == (3,)
        assert not client.freeze(a).flags.writeable
        check(client.gemm(a, b, c, alpha=2, beta=1j), a, b, c)
    assert sent.up > a.nbytes


def test_elsewhere_the_arrays_are_ordinary_ones(operands) -> None:
    a, _, _ = operands
    with Client("http://127.0.0.1:1") as client:
        x = client.empty((3, 4), np.complex64, "F")
        assert (x.shape, x.dtype, x.flags.f_contiguous, find(x)) == ((3, 4), np.complex64, True, None)
        frozen = client.freeze(a)
        assert not frozen.flags.writeable
        np.testing.assert_array_equal(frozen, a)
        assert frozen is not a
        assert a.flags.writeable


def test_keys(make, tmp_path, operands, monkeypatch) -> None:
    a, b, c = operands
    _, key = create_key(tmp_path / "data", "alice")
    app = make()
    monkeypatch.setenv("GEMMSERVE_API_KEY", key)
    with Client(app.url) as client:
        check(client.gemm(a, b, c, alpha=2, beta=1j), a, b, c)
        assert app.descriptors.sessions == 1
    with Client(app.url, api_key="") as client, pytest.raises(gemmserve.Unauthorized):
        client.gemm(a, b)
