"""Bodies that are read straight into their place: whatever comes before, after and instead of them on the wire."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time

import numpy as np
import pytest
import uvloop
from raw_connection import until

from gemmserve_service.http.protocol import body_receiver
from gemmserve_service.http.protocol.body_receiver import BodyReceiver
from gemmserve_service.http.protocol.connections import Connections

A = (np.arange(1 << 20) % 251).astype("c8").reshape(1024, 1024)  # 8 MiB: many reads


@pytest.fixture(params=["asyncio", "uvloop"])
def server(request, serve):
    """server(**settings) -> the app, live, on either event loop."""
    factory = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}[request.param]
    return lambda **fields: serve(loop_factory=factory, **fields)


@pytest.fixture
def direct(monkeypatch):
    """How many bytes came past the parser, by read."""
    counts = []
    original = BodyReceiver.receive_directly

    async def receive(self, view, patience_s):
        count = await original(self, view, patience_s)
        counts.append(count)
        return count

    monkeypatch.setattr(BodyReceiver, "receive_directly", receive)
    return counts


@pytest.fixture
def form_of(form):
    def encode(parts):
        body, headers = form(parts)
        return body, headers["Content-Type"]

    return encode


def head(method, path, length, *, kind="application/x-npy", more=""):
    return (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n{more}\r\n"
    ).encode()


def answer(connection):
    """(status, headers, body) of the next answer on the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(1 << 16)
        assert piece, data
        data += piece
    top, _, rest = data.partition(b"\r\n\r\n")
    lines = top.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines[1:])}
    length = int(headers.get("content-length", 0))
    while len(rest) < length:
        piece = connection.recv(1 << 20)
        assert piece, "the answer breaks off"
        rest += piece
    return int(lines[0].split()[1]), headers, rest[:length], rest[length:]


def stored(live, array_id):
    """The array's bytes as the store has them."""
    with live.core.store.pin(array_id) as pinned:
        return bytes(pinned.view)


def test_an_array_lands_and_the_connection_goes_on(server, direct, npy):
    live = server()
    body = npy(A)
    with live.connect() as connection:
        for _ in range(3):
            connection.sendall(head("POST", "/v1/arrays", len(body)) + body)
            status, _, data, more = answer(connection)
            assert (status, more) == (201, b"")
            assert stored(live, json.loads(data)["id"]) == A.tobytes()
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert answer(connection)[0] == 200
    assert sum(direct) > 2 * A.nbytes, "most of three arrays did not pass the parser"


def test_the_next_request_may_follow_at_once(server, direct, npy):
    """Pipelined: its first bytes come in the same segment as the body's last."""
    live = server()
    body = npy(A)
    small = npy(A[:1, :2])
    with live.connect() as connection:
        one = head("POST", "/v1/arrays", len(body)) + body
        other = head("POST", "/v1/arrays", len(small)) + small
        sender = threading.Thread(target=connection.sendall, args=(one + other + one,))
        sender.start()
        found = []
        rest = b""
        for expected in (A, A[:1, :2], A):
            while b"\r\n\r\n" not in rest:
                piece = connection.recv(1 << 16)
                assert piece
                rest += piece
            top, _, rest = rest.partition(b"\r\n\r\n")
            assert b" 201 " in top.split(b"\r\n")[0]
            length = int(top.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            while len(rest) < length:
                piece = connection.recv(1 << 16)
                assert piece
                rest += piece
            found.append((json.loads(rest[:length])["id"], expected))
            rest = rest[length:]
        sender.join(60)
    assert all(stored(live, array_id) == expected.tobytes() for array_id, expected in found)
    assert direct


def test_a_request_in_the_same_segment_as_the_end_of_a_body(server, direct, npy):
    """The end is too short to be direct, and comes past the parser together with what the parser is to read."""
    live = server()
    body = npy(A)
    with live.connect() as connection:
        connection.sendall(head("POST", "/v1/arrays", len(body)) + body[:-30_000])
        until(lambda: sum(direct) > A.nbytes // 2)
        time.sleep(0.3)  # the last read is over by then; were it not, this test would be easier to pass
        connection.sendall(body[-30_000:] + b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        status, _, data, rest = answer(connection)
        assert status == 201
        assert stored(live, json.loads(data)["id"]) == A.tobytes()
        while not rest.startswith(b"HTTP/1.1 200"):
            more = connection.recv(1 << 16)
            assert more
            rest += more


def test_bare_bytes_after_100_continue(server, direct):
    live = server()
    with live.connect() as connection:
        path = "/v1/arrays?dtype=complex64&shape=1024,1024"
        connection.sendall(
            head("POST", path, A.nbytes, kind="application/octet-stream", more="Expect: 100-continue\r\n")
        )
        assert answer(connection)[0] == 100
        connection.sendall(A.tobytes())
        status, headers, data, _ = answer(connection)
        assert status == 201
        assert "connection" not in headers
        assert stored(live, json.loads(data)["id"]) == A.tobytes()
    assert sum(direct) == A.nbytes


def test_a_client_that_hangs_up_leaves_nothing(server, direct, npy):
    live = server()
    body = npy(A)
    with live.connect() as connection:
        connection.sendall(head("POST", "/v1/arrays", len(body)) + body[: len(body) // 2])
        until(lambda: live.core.store.used_bytes == A.nbytes)
    until(lambda: live.core.store.used_bytes == 0)
    assert live.core.store.count == 0


def test_a_client_that_stops_is_answered_408(server, direct, npy):
    live = server(body_window_s=0.5)
    body = npy(A)
    with live.connect() as connection:
        with contextlib.suppress(ConnectionError):  # it has its answer before it has sent all, should it stand still
            connection.sendall(head("POST", "/v1/arrays", len(body)) + body[: 1 << 20])
        status, headers, data, _ = answer(connection)
    assert (status, headers["connection"]) == (408, "close")
    assert json.loads(data)["type"] == "/problems/request-timeout"
    until(lambda: live.core.store.used_bytes == 0)


def test_a_client_that_trickles_is_answered_408(server, direct, npy):
    """Something comes all the time, and less than the least rate."""
    live = server(body_window_s=0.5)
    body = npy(A)
    over = threading.Event()
    with live.connect() as connection:
        connection.sendall(head("POST", "/v1/arrays", len(body)) + body[:1000])

        def trickle():
            position = 1000
            with contextlib.suppress(ConnectionError):  # closed behind the answer
                while not over.wait(0.02):
                    connection.sendall(body[position : position + 1])
                    position += 1

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            assert answer(connection)[0] == 408
        finally:
            over.set()
            thread.join()
    assert direct


def test_a_slow_client_that_keeps_the_rate_is_served(serve_stepped, direct, npy):
    """What lands counts as what came."""
    live = serve_stepped(body_window_s=0.3, min_body_rate=2 << 20)  # more than what passes the parser
    uploads, allocate = [], live.core.store.allocate

    def watch(*args, **fields):
        uploads.append(allocate(*args, **fields))
        return uploads[-1]

    live.core.store.allocate = watch
    body = npy(A)
    step = len(body) // 8 + 1
    with live.connect() as connection:
        connection.sendall(head("POST", "/v1/arrays", len(body)))
        for start in range(0, len(body), step):
            reads = len(direct)
            connection.sendall(body[start : start + step])
            # A read ends when a tenth of a second has passed: what came is counted then, in three windows all in all.
            until(lambda before=reads: live.advance(0.02) or len(direct) > before)
        status, _, data, _ = answer(connection)
        assert status == 201
        assert stored(live, json.loads(data)["id"]) == A.tobytes()
    assert direct


@pytest.mark.parametrize("piece", [1 << 16, 1 << 18])
def test_what_a_slow_client_sends_lands_too(server, direct, npy, piece):
    """Far less in a tenth of a second than a read has: what came by then is read into its place, not by the parser."""
    live = server(min_body_rate=0)
    body = npy(A)[: 2 << 20]
    with live.connect() as connection:
        connection.sendall(head("POST", "/v1/arrays", len(npy(A))))
        for start in range(0, len(body), piece):
            connection.sendall(body[start : start + piece])
            time.sleep(0.03)
        until(lambda: sum(direct) >= len(body) - (1 << 18))


@pytest.mark.parametrize(("alone", "most"), [(False, 4), (True, 16)])
def test_others_have_their_turn_while_a_body_is_read(serve, monkeypatch, alone, most):
    """uvloop reads for as long as there is more, 32 times, before it looks at any other connection."""
    size = 1 << 16
    monkeypatch.setattr(body_receiver, "_MAX_READ", size // 16)
    monkeypatch.setattr(Connections, "alone", lambda *_: alone)
    turn, reads = [0], []
    original = body_receiver._Sink.buffer_updated

    def read(sink, nbytes):
        reads.append(turn[0])
        sink._connection.loop.call_soon(lambda: turn.append(turn.pop() + 1))
        original(sink, nbytes)

    monkeypatch.setattr(body_receiver._Sink, "buffer_updated", read)
    live = serve(loop_factory=uvloop.new_event_loop)
    with live.connect() as connection:
        path, kind = f"/v1/arrays?dtype=float32&shape={size // 4}", "application/octet-stream"
        connection.sendall(head("POST", path, size, kind=kind, more="Expect: 100-continue\r\n"))
        assert answer(connection)[0] == 100
        live.call(lambda: connection.sendall(bytes(size)))  # all of it has come when the loop looks
        assert answer(connection)[0] == 201
    assert max(map(reads.count, reads)) == most


def test_what_landed_is_counted(server, direct, npy):
    live = server()
    body = npy(A)
    with live.connect() as connection:
        connection.sendall(head("POST", "/v1/arrays", len(body)) + body)
        assert answer(connection)[0] == 201
    until(lambda: received(live) == len(body))


def received(live):
    return live.app.state.metrics.registry.get_sample_value("gemmserve_http_received_bytes_total")


def test_a_product_lands_in_its_parts(server, direct, npy, form_of, read_npy):
    live = server()
    b = np.full((1, 1), 2, "c8")
    column = A.reshape(-1, 1)
    body, kind = form_of([("a", npy(column)), ("b", npy(b)), ("c", npy(column)), ("params", b'{"beta": 1}')])
    with live.connect() as connection:
        for _ in range(2):
            connection.sendall(head("POST", "/v1/gemm", len(body), kind=kind) + body)
            status, _, data, _ = answer(connection)
            assert status == 200, data
            assert np.array_equal(read_npy(data), 3 * column)
    assert sum(direct) > 2 * A.nbytes


@pytest.mark.parametrize(("lacking", "after"), [(1000, b"tail"), (1, b""), (1 << 19, b"x" * 3000)])
def test_a_part_that_is_shorter_than_its_header_says(server, direct, npy, form_of, lacking, after):
    live = server()
    cut = npy(A)[:-lacking]
    body, kind = form_of([("a", cut), ("b", npy(np.ones((1024, 200), "c8"))), ("params", b"{}" + after)])
    with live.connect() as connection:
        connection.sendall(head("POST", "/v1/gemm", len(body), kind=kind) + body)
        status, _, data, _ = answer(connection)
    problem = json.loads(data)
    assert (status, problem["type"]) == (400, "/problems/body-length")
    assert problem["detail"] == f"part a: its header says {A.nbytes} bytes of data, {A.nbytes - lacking} came"
    assert live.core.store.scratch_bytes == 0


def test_a_part_that_is_longer_than_its_header_says(server, direct, npy, form_of):
    live = server()
    body, kind = form_of([("a", npy(A) + b"x"), ("b", npy(np.ones((1024, 2), "c8")))])
    with live.connect() as connection:
        connection.sendall(head("POST", "/v1/gemm", len(body), kind=kind) + body)
        status, _, data, _ = answer(connection)
    assert (status, json.loads(data)["type"]) == (400, "/problems/body-length")
    assert "goes on past" in json.loads(data)["detail"]
