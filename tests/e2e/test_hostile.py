"""Bodies that lie, break off or come all at once: what they cost the real server, seen from outside."""

from __future__ import annotations

import contextlib
import io
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
from live_server import LiveServer, until
from long_bodies import BODIES
from long_bodies import request as long_request

import gemmserve
from gemmserve import Client
from gemmserve.wire import format_npy_header

MIB = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Server of these tests alone: they look at its memory and its space."""
    with LiveServer(data_dir=tmp_path_factory.mktemp("data")) as live:
        yield live


@pytest.fixture
def http(server):
    with server.http() as connected:
        yield connected


def anonymous_bytes(server) -> int:
    """Private memory of all of its processes: mapped array files are not counted, copies of a body would be."""
    lines = []
    for process in server.processes():
        with contextlib.suppress(OSError), open(f"/proc/{process.pid}/status") as status:  # noqa: PTH123 (procfs)
            lines += [line for line in status if line.startswith("RssAnon:")]
    assert len(lines) >= 3, "supervisor, front and worker"
    return sum(int(line.split()[1]) * 1024 for line in lines)


def used_bytes(http) -> int:
    """Return the bytes of arrays and of what is under way."""
    usage = http.get("/v1/usage").json()
    return usage["store_bytes"] + usage["scratch_bytes"]


def wait_until_nothing_else_is_held(server, http) -> int:
    """Waits until what others have deleted is gone, and nothing is under way; returns the bytes that are used then."""
    server.wait_quiet()

    def settled() -> bool:
        listed = http.get("/v1/arrays", params={"limit": 1000}).json()["items"]
        return used_bytes(http) == sum(item["nbytes"] for item in listed)

    until(settled)
    return used_bytes(http)


def npy(array: np.ndarray) -> bytes:
    body = io.BytesIO()
    np.save(body, array)
    return body.getvalue()


def raw_upload(server, head: bytes, length: int) -> socket.socket:
    """A connection that has sent the head of an upload of `length` bytes and goes on from there."""
    address = urlsplit(server.url)
    connection = socket.create_connection((address.hostname, address.port), timeout=120)
    connection.sendall(
        f"POST /v1/arrays HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/x-npy\r\n"
        f"Content-Length: {length}\r\n\r\n".encode()
        + head
    )
    return connection


@pytest.mark.parametrize("shape", [(1 << 60,), (1 << 30, 1 << 30), (1 << 62, 0), (-1, 4)])
def test_a_header_that_claims_too_much_costs_nothing(server, http, shape) -> None:
    header = format_npy_header(np.dtype("complex64"), shape)
    server.wait_quiet()
    before = anonymous_bytes(server)
    answer = http.post("/v1/arrays", content=header, headers={"Content-Type": "application/x-npy"})
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert anonymous_bytes(server) - before < 8 * MIB
    assert http.get("/readyz").status_code == 200


@pytest.mark.parametrize("columns", [1, 1 << 40])
def test_empty_operands_with_an_enormous_product(server, http, columns) -> None:
    """K = 0 is lawful and uploads are empty, but the product of zeros would be 8 TiB and more."""
    ids = []
    for shape in ((1 << 40, 0), (0, columns)):
        header = format_npy_header(np.dtype("complex64"), shape)
        answer = http.post("/v1/arrays", content=header, headers={"Content-Type": "application/x-npy"})
        assert answer.status_code == 201, answer.text
        ids.append(answer.json()["id"])
    server.wait_quiet()
    before = anonymous_bytes(server)
    answer = http.post("/v1/jobs", json={"op": "gemm", "a": ids[0], "b": ids[1]})
    assert answer.status_code in {413, 422}, answer.text
    assert anonymous_bytes(server) - before < 8 * MIB


def test_a_body_is_not_held_in_memory(server, client) -> None:
    """An upload of 256 MiB goes to its place piece by piece."""
    client.put(np.zeros((1, 1)))
    server.wait_quiet()
    before = anonymous_bytes(server)
    remote = client.put(np.ones((32, MIB)))
    during = anonymous_bytes(server)
    # The sockets' buffers are kept between requests (docs/transfer.md), up to glibc's raised threshold of 32 MiB.
    assert during - before < 64 * MIB
    remote.delete()


def test_hanging_up_gives_the_space_back(server, http) -> None:
    before = wait_until_nothing_else_is_held(server, http)
    header = format_npy_header(np.dtype("float64"), (8, MIB))
    connection = raw_upload(server, header + b"\0" * MIB, len(header) + 64 * MIB)
    until(lambda: used_bytes(http) == before + 64 * MIB)  # reserved before the data have come
    connection.close()
    until(lambda: used_bytes(http) == before)


@pytest.mark.parametrize(("claimed", "sent"), [(4, 3), (4, 5)])
def test_a_body_that_disagrees_with_its_header(http, claimed, sent) -> None:
    body = format_npy_header(np.dtype("float64"), (claimed,)) + b"\0" * (8 * sent)
    answer = http.post("/v1/arrays", content=body, headers={"Content-Type": "application/x-npy"})
    assert answer.status_code == 400
    assert answer.json()["type"].endswith("/body-length")


def test_pickles_are_never_read(http) -> None:
    body = npy(np.array([{"an": "object"}], dtype=object))
    answer = http.post("/v1/arrays", content=body, headers={"Content-Type": "application/x-npy"})
    assert answer.status_code in {400, 422}
    assert "pickle" in answer.json()["detail"]


def test_long_json_stalls_nobody_and_is_not_kept(server, http) -> None:
    """Eight clients with 16 MiB each that cost a parser most. `make attacks` has the exact figures."""
    server.wait_quiet()
    before = anonymous_bytes(server)
    requests = [long_request(name) for name in BODIES]
    slowest, done = 0.0, threading.Event()

    def send(data: bytes) -> bytes:
        address = urlsplit(server.url)
        with socket.create_connection((address.hostname, address.port), timeout=120) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
            return connection.recv(1000)

    def look() -> None:
        nonlocal slowest
        with server.http() as client:
            while not done.is_set():
                began = time.monotonic()
                assert client.get("/livez").status_code == 200
                slowest = max(slowest, time.monotonic() - began)

    with ThreadPoolExecutor(9) as pool:
        looking = pool.submit(look)
        try:
            answers = list(pool.map(send, requests * 2))
        finally:
            done.set()
        looking.result()
    assert all(answer.startswith(b"HTTP/1.1 ") for answer in answers)
    assert not any(answer.startswith(b"HTTP/1.1 5") for answer in answers)
    assert slowest < 5
    server.wait_quiet()
    # glibc keeps what it was given back up to its raised thresholds (`runtime.keep_freed_memory`).
    assert anonymous_bytes(server) - before < 400 * MIB


def test_two_dozen_clients_at_once(server, rng) -> None:
    """Their answers are not mixed up."""
    factors = rng.standard_normal((24, 32, 32))

    def product(index: int) -> bool:
        with Client(server.url) as client:
            remote = client.put(factors[index])
            one_shot = client.gemm(factors[index], factors[index])
            chained = (remote @ remote).numpy()
        truth = factors[index] @ factors[index]
        return np.allclose(one_shot, truth) and np.allclose(chained, truth)

    with ThreadPoolExecutor(24) as pool:
        assert all(pool.map(product, range(24)))


def test_bad_input_never_kills_a_worker(server, client) -> None:
    workers = {process.pid for process in server.workers()}
    a = np.ones((4, 5), dtype=np.complex64)
    remote = client.put(a)
    bad = [
        lambda: client.gemm(remote, remote),
        lambda: client.submit("gemm", remote, remote.T, beta=1),
        lambda: client.gemm_reduce(remote, remote.T, reduce="min"),
        lambda: client.gemm(client.put(np.ones(4)), remote),
        lambda: client.gemm(client.put(a.real), a.T, config={"block_m": 3, "algorithm": "simt"}),
        lambda: client.gemm(client.put(a.real), a.T.real.copy(), alpha=1j),
    ]
    for attempt in bad:
        with pytest.raises(gemmserve.InvalidRequest):
            attempt()
    assert {process.pid for process in server.workers()} == workers
    assert all(psutil.pid_exists(pid) for pid in workers)
    np.testing.assert_allclose((remote @ remote.H).numpy(), a @ a.T)
