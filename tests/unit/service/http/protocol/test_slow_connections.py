"""Slow and stalled connections: what is cut off and when. The server's clock stands still and passes a limit when the
test says so.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import select
import ssl
import time

import httpx
import numpy as np
import pytest
from certificates import make_certificate
from raw_connection import GET, Raw, answer_of, closed, read_all, until, upload_head

from gemmserve_service.http.protocol import connections
from gemmserve_service.http.protocol.connections import Connections
from gemmserve_service.http.protocol.protocol import State
from gemmserve_service.tenancy.api_keys import Quota
from gemmserve_service.tenancy.keyring import create_key


def patiently(live, connection, step_s, trickle=b""):
    """Lets time pass, and sends `trickle` at every step, until the server sends something or closes; all of it."""
    deadline = time.monotonic() + 60
    while not select.select([connection], [], [], 0.002)[0]:
        assert time.monotonic() < deadline
        with contextlib.suppress(ConnectionError):
            connection.sendall(trickle)
        live.advance(step_s)
    return read_all(connection)


def in_head(live):
    """Whether a connection is in the middle of a head."""
    return any(one.state is State.HEAD for one in tuple(live.connection_class.registry._idle))


class TestHeads:
    @pytest.fixture
    def live(self, serve_stepped):
        return serve_stepped(head_timeout_s=0.6)

    def test_a_silent_connection_is_closed(self, live):
        with live.connect() as connection:
            until(lambda: live.connections == 1)
            live.advance(0.5)
            assert live.connections == 1, "before its time was up"
            live.advance(0.5)
            assert closed(connection)

    def test_a_trickling_head_is_cut_off(self, live):
        with live.connect() as connection:
            connection.sendall(GET[:5])
            until(lambda: in_head(live))
            status, headers, problem = answer_of(patiently(live, connection, 0.1, trickle=b"x"))
        assert (status, headers["connection"], problem["type"]) == (408, "close", "/problems/request-timeout")
        assert headers["content-type"] == "application/problem+json"

    def test_a_trickling_head_after_a_request_is_cut_off_too(self, live):
        with contextlib.closing(Raw(live)) as raw:
            raw.socket.sendall(GET)
            assert raw.answer()[0] == 200
            live.advance(0.5)  # the clock of a head starts with its first byte
            raw.socket.sendall(GET[:10])
            until(lambda: in_head(live))
            live.advance(0.5)
            assert live.connections == 1, "before its time was up"
            live.advance(0.5)
            assert answer_of(read_all(raw.socket))[0] == 408

    def test_a_finished_request_may_pause(self, live):
        """Keep-alive is longer than the time that a head may take."""
        with contextlib.closing(Raw(live)) as raw:
            for _ in range(3):
                raw.socket.sendall(GET)
                assert raw.answer()[0] == 200
                for _ in range(3):
                    live.advance(0.5)


def test_many_trickling_heads_are_cut_off_some_at_a_time(serve_stepped, monkeypatch):
    """A thousand at once kept everybody else waiting for 30 ms."""
    live = serve_stepped(head_timeout_s=0.6)
    order, too_slow = [], live.connection_class.too_slow

    def watch(connection):
        order.append("cut off")
        connection.loop.call_soon(order.append, "others' turn")
        too_slow(connection)

    monkeypatch.setattr(live.connection_class, "too_slow", watch)
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(live.connect()) for _ in range(50)]
        for connection in slow:
            connection.sendall(GET[:5])
        until(lambda: sum(one.state is State.HEAD for one in tuple(live.connection_class.registry._idle)) == len(slow))
        live.advance(1.2)
        for _ in range(-(-len(slow) // connections._ENDED_AT_ONCE)):
            live.advance(connections._BREATH_S)
        assert all(answer_of(read_all(connection))[0] == 408 for connection in slow)
    until(lambda: len(order) == 2 * len(slow))
    runs = [len(list(group)) for what, group in itertools.groupby(order) if what == "cut off"]
    assert sum(runs) == len(slow)
    assert max(runs) <= connections._ENDED_AT_ONCE < len(slow)


def watched(live):
    """Every upload for which there is space from now on."""
    uploads, allocate = [], live.core.store.allocate

    def watch(*args, **fields):
        uploads.append(allocate(*args, **fields))
        return uploads[-1]

    live.core.store.allocate = watch
    return uploads


class TestBodies:
    @pytest.fixture
    def live(self, serve_stepped):
        return serve_stepped(head_timeout_s=0.6, body_window_s=0.5, min_body_rate=1000)

    def test_a_byte_now_and_then_is_cut_off_and_its_space_freed(self, live):
        with live.connect() as connection:
            connection.sendall(upload_head(1 << 20))
            until(lambda: live.core.store.used_bytes == 1 << 20)
            status, headers, problem = answer_of(patiently(live, connection, 0.05, trickle=b"x"))
        assert (status, headers["connection"], problem["type"]) == (408, "close", "/problems/request-timeout")
        until(lambda: live.core.store.used_bytes == 0)
        until(lambda: live.core.quotas.inflight_bytes("") == 0)

    def test_fast_at_first_is_no_credit_for_ever(self, live):
        with live.connect() as connection:
            connection.sendall(upload_head(1 << 20) + bytes(1 << 19))
            assert answer_of(patiently(live, connection, 0.25))[0] == 408

    def test_slow_but_fast_enough_is_let_finish(self, live):
        uploads = watched(live)
        with contextlib.closing(Raw(live)) as raw:
            raw.socket.sendall(upload_head(4000))
            for come in range(400, 4001, 400):
                raw.socket.sendall(bytes(400))
                until(lambda come=come: uploads and uploads[0].filled == come)
                live.advance(0.2 if come < 4000 else 0)
            assert raw.answer()[0] == 201

    def test_parts_of_a_one_shot_too(self, live, npy, form):
        body, headers = form([("a", npy(np.ones((100, 100)))), ("b", npy(np.ones((100, 100))))])
        head = (
            "POST /v1/gemm HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Content-Type: {headers['Content-Type']}\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        uploads = watched(live)
        with live.connect() as connection:
            connection.sendall(head + body[: len(body) * 3 // 4])
            assert answer_of(patiently(live, connection, 0.25))[0] == 408
        assert len(uploads) == 2
        until(lambda: live.core.store.scratch_bytes == 0)
        until(lambda: live.core.quotas.scratch_bytes("") == 0)

    def test_the_rest_of_a_refused_body_is_not_waited_for(self, live):
        """It is answered at once; who then trickles on holds a connection, and loses it."""
        with contextlib.closing(Raw(live)) as raw:
            raw.socket.sendall(b"POST /v1/nothing HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\n\r\n")
            status, _, body = raw.answer()
            assert (status, json.loads(body)["type"]) == (404, "/problems/not-found")
            assert patiently(live, raw.socket, 0.05, trickle=b"x") == b""

    def test_a_quota_is_given_back_to_its_owner(self, live, settings):
        _, text = create_key(settings.data_dir, "alice", quota=Quota(stored_bytes=1 << 20, inflight_bytes=1 << 20))
        owner = text.split("_")[1]
        live.call(live.core.keyring.refresh)
        head = upload_head(1 << 20, Authorization=f"Bearer {text}")
        with live.connect() as connection:
            connection.sendall(head + b"x")
            until(lambda: live.core.quotas.inflight_bytes(owner) == 1 << 20)
            with contextlib.closing(Raw(live)) as other:
                other.socket.sendall(head)
                assert json.loads(other.answer()[2])["type"] == "/problems/quota-exceeded"
            assert answer_of(patiently(live, connection, 0.25))[0] == 408
        until(lambda: live.core.quotas.inflight_bytes(owner) == 0)
        assert live.core.quotas.stored_bytes(owner) == 0


def test_who_does_not_take_an_answer_is_cut_off(serve_stepped, npy):
    live = serve_stepped(send_stall_s=0.6)
    with live.http() as client:
        info = client.post(
            "/v1/arrays", content=npy(np.zeros(4 << 20)), headers={"Content-Type": "application/x-npy"}
        ).json()
        with live.connect(receive_buffer=4096) as connection:
            connection.sendall(f"GET /v1/arrays/{info['id']}/data HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            connection.recv(100)
            until(lambda: live.stalled)
            client.delete(f"/v1/arrays/{info['id']}")
            live.advance(0.5)
            assert live.core.store.used_bytes > 0, "the download holds it"
            live.advance(0.5)
            until(lambda: live.core.store.used_bytes == 0)


def test_a_slow_reader_that_goes_on_reading_gets_it_all(serve_stepped, npy, monkeypatch):
    live = serve_stepped(send_stall_s=0.6)
    taken = []
    flows = Connections.flows
    monkeypatch.setattr(Connections, "flows", lambda *arguments: taken.append(flows(*arguments)))
    array = np.random.default_rng(0).standard_normal(1 << 21)
    with live.http() as client:
        info = client.post("/v1/arrays", content=npy(array), headers={"Content-Type": "application/x-npy"}).json()
    received, slept = bytearray(), 0.0
    with live.connect(receive_buffer=1 << 16) as connection:
        connection.sendall(f"GET /v1/arrays/{info['id']}/data HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        received += connection.recv(1)
        while live.tasks:
            until(lambda: live.stalled or not live.tasks)
            if not live.stalled:
                break
            before = len(taken)
            live.advance(0.5)
            slept += 0.5
            while live.tasks and len(taken) == before:
                received += connection.recv(1 << 16)
        while not received.endswith(array[-1].tobytes()):
            piece = connection.recv(1 << 16)
            assert piece, "it was cut off"
            received += piece
    assert received[-array.nbytes :] == array.tobytes()
    assert slept > 2 * 0.6, "it was never slow for longer than a stall may last"


def test_an_idle_connection_ends_after_keep_alive(serve_stepped):
    live = serve_stepped(keep_alive_s=0.3)
    with contextlib.closing(Raw(live)) as raw:
        raw.socket.sendall(GET)
        assert raw.answer()[0] == 200
        live.advance(0.2)
        assert live.connections == 1, "before its time was up"
        live.advance(0.2)
        assert closed(raw.socket)


def test_requests_sent_ahead_are_answered_in_order(serve_stepped):
    live = serve_stepped(head_timeout_s=0.6)
    with contextlib.closing(Raw(live)) as raw:
        raw.socket.sendall(GET + GET.replace(b"livez", b"nope") + GET + GET[:7])
        assert [raw.answer()[0] for _ in range(3)] == [200, 404, 200]
        assert answer_of(patiently(live, raw.socket, 0.25))[0] == 408


def test_handshakes_that_do_not_end_are_cut_off(serve_stepped, tmp_path):
    """With TLS a connection costs something before its first request; others go on meanwhile."""
    certificate, key = make_certificate(tmp_path)
    live = serve_stepped(tls_certificate=certificate, tls_key=key, head_timeout_s=0.6)
    trust = ssl.create_default_context(cafile=certificate)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(live.connect()) for _ in range(50)]
        for connection in silent[::2]:
            connection.sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a ClientHello
        url = f"https://127.0.0.1:{live.port}"
        with httpx.Client(base_url=url, verify=trust, timeout=60, trust_env=False) as client:
            assert client.get("/livez").status_code == 200  # the others were accepted before it
        live.advance(0.7)
        assert all(closed(connection) for connection in silent)
