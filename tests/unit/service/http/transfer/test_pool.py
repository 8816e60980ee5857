"""Bodies that transfer processes move: byte for byte what the front alone would do, whatever clients do."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import threading
import time
from base64 import b64encode

import httpx
import numpy as np
import pytest
import uvloop
from raw_connection import GET, until, upload_head
from transfer_processes import TransferThreads
from transfers import BARE, F64, MIB, OCTETS, A, download, metric, read_answer, same, store, transferred_by

from gemmserve_service.store.extents.arena import Arena
from gemmserve_service.store.extents.memfd import create_arena


@pytest.fixture(params=["asyncio", "uvloop"])
def served_by_loop(request, serve):
    """served_by_loop(count, **settings) -> the app with so many transfer processes, on either event loop."""
    factory = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}[request.param]
    return lambda count=1, **fields: transferred_by(TransferThreads, serve, count, loop_factory=factory, **fields)


@pytest.fixture
def served(serve):
    """The same, on the loop that is used."""
    return lambda count=1, **fields: transferred_by(TransferThreads, serve, count, **fields)


# -- up ---------------------------------------------------------------------------------------------------------------


def test_an_upload_and_the_request_right_behind_it(served_by_loop):
    """They come in one stream: a process that read a byte too much would take it from the second, and one less ..."""
    with served_by_loop() as (live, processes):
        body = A.tobytes()
        with live.connect() as connection, connection.makefile("rb") as file:
            sender = threading.Thread(target=connection.sendall, args=((upload_head(len(body)) + body) * 2 + GET,))
            sender.start()
            stored = []
            for _ in range(2):
                status, info = read_answer(file)
                assert status == 201, info
                stored.append(httpx.Response(200, content=info).json()["id"])
            assert read_answer(file)[0] == 200
            sender.join(60)
        assert processes.transfers.transferred_bytes["in"]
        assert metric(live, "gemmserve_http_received_bytes_total") == 2 * len(body)
        with live.http() as http:
            for array_id in stored:
                found = http.get(f"/v1/arrays/{array_id}/data", headers=BARE).content
                assert found == body


def test_npy_digest_and_100_continue(served, npy):
    with served() as (live, processes), live.http() as http:
        body = npy(A.reshape(1024, -1))
        digest = {"Content-Digest": f"sha-256=:{b64encode(hashlib.sha256(body).digest()).decode()}:"}
        kind = {"Content-Type": "application/x-npy", **digest}
        assert http.post("/v1/arrays", content=body, headers=kind).status_code == 201
        assert http.post("/v1/arrays", content=body[:-1] + b"x", headers=kind).json()["type"].endswith("mismatch")
        with live.connect() as connection, connection.makefile("rb") as file:
            connection.sendall(upload_head(A.nbytes, Expect="100-continue"))
            assert file.readline().startswith(b"HTTP/1.1 100")
            file.readline()
            connection.sendall(A.tobytes())
            assert read_answer(file)[0] == 201
        assert processes.transfers.transferred_bytes["in"]


def test_parts_and_where_they_broke(served_by_loop):
    with served_by_loop() as (live, processes), live.http() as http:
        body = A.tobytes()
        url = http.post("/v1/uploads", params=F64, headers=OCTETS).headers["location"]
        assert http.put(f"{url}/parts/{4 * MIB}", content=body[4 * MIB :], headers=OCTETS).status_code == 204
        assert processes.transfers.transferred_bytes["in"]
        head = (
            f"PUT {url}/parts/0 HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/octet-stream\r\n"
            f"Content-Length: {4 * MIB}\r\n\r\n"
        )
        with live.connect() as connection:
            connection.sendall(head.encode() + body[: 3 * MIB])
            until(lambda: any(one.received for one in next(iter(live.core.uploads._uploads.values())).parts))
        until(lambda: live.tasks == 0)
        offset = http.get(url).json()["received"][0][1]
        assert 0 < offset <= 3 * MIB
        answer = http.put(f"{url}/parts/{offset}", content=body[offset : 4 * MIB], headers=OCTETS)
        assert answer.status_code == 204
        done = http.post(f"{url}/complete")
        found = http.get(f"/v1/arrays/{done.json()['id']}/data", headers=BARE)
        assert found.content == body


def test_a_client_that_stops_in_the_middle_is_answered_408(served):
    with served(min_body_rate=1 << 20, body_window_s=0.5) as (live, processes):
        with live.connect() as connection, connection.makefile("rb") as file:
            connection.sendall(upload_head(64 * MIB) + bytes(2 * MIB))
            status, problem = read_answer(file)
        assert (status, b"request-timeout" in problem) == (408, True)
        until(lambda: live.core.store.used_bytes == 0)
        assert processes.transfers.under_way == 0


def test_a_client_that_hangs_up_leaves_nothing(served_by_loop):
    with served_by_loop() as (live, _):
        with live.connect() as connection:
            connection.sendall(upload_head(64 * MIB) + bytes(2 * MIB))
            until(lambda: live.core.store.used_bytes)
        until(lambda: live.tasks == 0)
        assert live.core.store.used_bytes == 0
        assert live.core.store.count == 0


# -- down -------------------------------------------------------------------------------------------------------------


def test_a_download_a_range_and_what_follows(served_by_loop, read_npy):
    with served_by_loop() as (live, processes):
        path, body = f"/v1/arrays/{store(live)}/data", A.tobytes()
        get = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        bare = f"{get}Accept: application/octet-stream\r\n"
        with live.connect() as connection, connection.makefile("rb") as file:
            connection.sendall(f"{get}\r\n{bare}\r\n{bare}Range: bytes=100-{5 * MIB}\r\n\r\n".encode() + GET)
            status, whole = read_answer(file)
            assert status == 200
            assert np.array_equal(read_npy(whole), A)
            assert same(read_answer(file), 200, body)
            assert same(read_answer(file), 206, body[100 : 5 * MIB + 1])
            assert read_answer(file)[0] == 200
        assert processes.transfers.transferred_bytes["out"]
        sent = len(whole) + len(body) + 5 * MIB - 99
        assert sent <= metric(live, "gemmserve_http_sent_bytes_total") < sent + (1 << 16)


def test_a_slow_reader_gets_every_byte(served):
    """It goes to and fro between process and front."""
    with served() as (live, processes):
        array_id = store(live, np.tile(A, 4))
        with live.connect(receive_buffer=1 << 16) as connection:
            connection.sendall(
                f"GET /v1/arrays/{array_id}/data HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                "Accept: application/octet-stream\r\n\r\n".encode()
            )
            until(lambda: processes.transfers.transferred_bytes["out"])  # a transfer has ended by its patience
            until(lambda: live.stalled == 1)
            with connection.makefile("rb") as file:
                assert same(read_answer(file), 200, A.tobytes() * 4)


def test_a_reader_that_hangs_up(served_by_loop):
    with served_by_loop() as (live, processes):
        array_id = store(live, np.tile(A, 4))
        with live.connect(receive_buffer=1 << 16) as connection:
            connection.sendall(download(array_id))
            assert connection.recv(1000)
        until(lambda: live.tasks == 0)
        assert processes.transfers.under_way == 0


def test_a_reader_that_takes_nothing_is_cut_off(served):
    with served(send_stall_s=0.5) as (live, _):
        array_id = store(live, np.tile(A, 4))
        with live.connect(receive_buffer=1 << 16) as connection:
            connection.sendall(download(array_id))
            assert connection.recv(1)
            until(lambda: live.tasks == 0)


def test_a_product(served, npy, form, read_npy):
    a, b = np.ones((1024, 2048)), np.full((2048, 1024), 2.0)
    with served() as (live, processes), live.http() as http:
        body, headers = form([("a", npy(a)), ("b", npy(b))])
        answer = http.post("/v1/gemm", content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert np.array_equal(read_npy(answer.content), a @ b)
        assert processes.transfers.transferred_bytes["in"]
        assert processes.transfers.transferred_bytes["out"]
        until(lambda: live.core.store.scratch_bytes == 0)


LONGER_S = 0.15
"""Longer than a connection counts as one of several after another's request."""


def send_alone(connection, body, count):
    """Begins an upload with the first `count` bytes of its body, when no other connection has had a request for a
    while.
    """
    connection.sendall(GET)
    file = connection.makefile("rb")
    assert read_answer(file)[0] == 200
    time.sleep(LONGER_S)
    connection.sendall(upload_head(len(body)) + body[:count])
    return file


def test_the_front_itself_serves_a_connection_that_is_alone(served):
    body = A.tobytes()
    with served(alone_below=2 * A.nbytes) as (live, processes), live.connect() as connection:
        with send_alone(connection, body, len(body)) as file:
            status, info = read_answer(file)
            assert status == 201
            connection.sendall(download(httpx.Response(200, content=info).json()["id"]))
            assert read_answer(file)[1].endswith(body)
        assert not processes.transfers.transferred_bytes


def test_a_connection_is_not_alone_when_another_request_has_just_ended(served):
    """Though that request began before its own."""
    body = A.tobytes()
    with served(alone_below=2 * A.nbytes) as (live, processes), live.connect() as first, live.connect() as second:
        first.sendall(upload_head(len(body)))  # a request that lasts
        with second.makefile("rb") as file, first.makefile("rb") as other:
            second.sendall(GET)
            assert read_answer(file)[0] == 200
            time.sleep(LONGER_S)
            first.sendall(body)
            assert read_answer(other)[0] == 201
            before = processes.transfers.transferred_bytes["in"]
            second.sendall(upload_head(len(body)) + body)
            assert read_answer(file)[0] == 201
        assert processes.transfers.transferred_bytes["in"] > before


def test_a_larger_body_goes_by_a_process(served):
    body = A.tobytes()
    with served(alone_below=A.nbytes // 2) as (live, processes), live.connect() as connection:
        with send_alone(connection, body, len(body)) as file:
            assert read_answer(file)[0] == 201
        assert processes.transfers.transferred_bytes["in"]


def test_a_process_takes_over_when_another_request_comes(served):
    body = A.tobytes() * 4
    with served(alone_below=2 * len(body)) as (live, processes), live.connect() as connection, live.http() as http:
        with send_alone(connection, body, 2 * MIB) as file:
            assert http.get("/livez").status_code == 200
            assert not processes.transfers.transferred_bytes
            connection.sendall(body[2 * MIB :])
            assert read_answer(file)[0] == 201
        assert processes.transfers.transferred_bytes["in"]


def test_without_a_process_the_front_does_it(served):
    with served(0) as (live, processes), live.http() as http:
        found = http.get(f"/v1/arrays/{store(live)}/data", headers=BARE)
        assert found.content == A.tobytes()
        assert not processes.transfers.transferred_bytes


def test_a_result_in_the_host_arena(served):
    with served() as (live, processes), live.http() as http, contextlib.ExitStack() as stack:
        array_id = store(live)
        fd = create_arena(4 * A.nbytes)
        stack.callback(os.close, fd)
        arena = Arena(f"/proc/self/fd/{fd}", 4 * A.nbytes)
        arena.allocate(A.nbytes)  # the other does not begin where the memory does
        record = live.core.store._catalog.get(array_id)
        record.extent = arena.allocate(A.nbytes)
        record.extent.view(A.nbytes)[:] = (2 * A).tobytes()
        found = http.get(f"/v1/arrays/{array_id}/data", headers=BARE | {"Range": f"bytes=8-{A.nbytes - 1}"})
        assert found.content == (2 * A[1:]).tobytes()
        assert processes.transfers.transferred_bytes["out"]
