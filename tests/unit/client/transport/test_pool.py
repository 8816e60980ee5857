"""How many connections there are, and when they end."""

from __future__ import annotations

import asyncio
import socket
import threading

import httpx
import pytest
from scripted_server import ScriptedServer, ok

from gemmserve._transport import pool as _pool
from gemmserve._transport.pool import AsyncPool, SyncPool


def make() -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200)))


def test_a_connection_is_made_when_all_others_are_in_use() -> None:
    made = []
    pool = SyncPool(lambda: made.append(1) or make())
    with pool.connection() as one:
        with pool.connection() as other:
            assert one is not other
        with pool.connection() as again:
            assert again is other
    with pool.connection() as last:
        assert last is one  # the one given back last
    assert len(made) == 2
    pool.close()


def test_what_nobody_needs_is_closed(monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr(_pool.time, "monotonic", lambda: now[0])
    pool = SyncPool(make)
    with pool.connection() as one, pool.connection() as other:
        pass
    for _ in range(2):
        now[0] += _pool.IDLE_S * 0.75
        with pool.connection():
            pass
    assert (one.is_closed, other.is_closed) == (False, True)
    pool.close()
    assert one.is_closed


def test_a_closed_pool_gives_nothing_and_closes_what_comes_back() -> None:
    pool = SyncPool(make)
    with pool.connection() as http:
        pool.close()
        assert not http.is_closed
    assert http.is_closed
    with pytest.raises(RuntimeError, match="closed"), pool.connection():
        pass


def test_a_client_of_the_caller_s_own_transport_serves_all() -> None:
    shared = make()
    pool = SyncPool(make, shared)
    with pool.connection() as one, pool.connection() as other:
        assert one is other is shared
    pool.close()
    assert shared.is_closed


def test_so_many_at_one_time_and_those_that_wait_besides(monkeypatch) -> None:
    monkeypatch.setattr(_pool, "IN_FLIGHT", 2)
    pool = SyncPool(make)
    entered = threading.Semaphore(0)
    leave = threading.Event()

    def work() -> None:
        with pool.connection():
            entered.release()
            leave.wait(60)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert entered.acquire(timeout=60)
    assert entered.acquire(timeout=60)
    with pool.connection(idle=True):  # does not count, and does not wait
        assert not entered.acquire(timeout=0.05)
    leave.set()
    for thread in threads:
        thread.join()
    assert len(pool._free) == 3
    pool.close()


async def test_awaited(monkeypatch) -> None:
    monkeypatch.setattr(_pool, "IN_FLIGHT", 2)
    pool = AsyncPool(lambda: httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(200))))
    inside, most = 0, 0

    async def work() -> None:
        nonlocal inside, most
        async with pool.connection() as http:
            inside += 1
            most = max(most, inside)
            await http.get("http://host/")
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*[work() for _ in range(9)])
    assert (most, len(pool._free)) == (2, 2)
    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(pool._free) == 2  # it came back
    await pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        await work()


def test_sockets_that_are_left_are_nobody_s_and_others_stay() -> None:
    """In a child that is: here the copies are this process's only ones, so that the other side sees the end."""
    with ScriptedServer(lambda _body, _number: ok(b"")) as server:
        pool = SyncPool(lambda: httpx.Client(trust_env=False))
        with pool.connection() as http, http.stream("GET", "http://{}:{}/".format(*server.address)) as answer:
            pool.note(http, answer)
        (known,) = pool._sockets.values()
        with socket.socket() as other:
            pool._sockets[make()] = (other.fileno(), known[1], known[2])  # a number that means something else by now
            pool.leave()
            assert other.getsockname()
            found = server._open[0]
            found.settimeout(60)
            assert found.recv(1) == b""
