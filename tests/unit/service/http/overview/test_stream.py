"""The stream over a real socket: one rendering for many, changes alone, and nobody holds up anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from functools import partial

import numpy as np
import pytest
from raw_connection import until

from gemmserve_service.http.overview import snapshot as snapshot_module
from gemmserve_service.http.overview.stream import MAX_LISTENERS, MAX_LISTENERS_OF_OWNER, Listener
from gemmserve_service.tenancy.api_keys import Scope
from gemmserve_service.tenancy.identity import ANYONE
from gemmserve_service.tenancy.keyring import create_key, revoke_key


class Ear:
    """A listener in a thread: what it is sent, event by event. Each is a chunk of its own, so lines are never cut."""

    def __init__(self, live, **headers) -> None:
        self.events = []
        self.ended = threading.Event()
        self.live = live
        self._socket = live.connect()
        lines = ["GET /v1/overview/stream HTTP/1.1", "Host: 127.0.0.1"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode())
        self._file = self._socket.makefile("rb")
        self.status = int(self._file.readline().split()[1])
        fields = (line.decode().strip().partition(": ") for line in iter(self._file.readline, b"\r\n"))
        self.headers = {name: value for name, _, value in fields}
        threading.Thread(target=self._run, daemon=True).start()
        until(lambda: self.events or self.ended.is_set())

    def _run(self):
        kind = None
        with contextlib.suppress(OSError, ValueError):  # closed by the test
            for line in self._file:
                name, _, value = line.decode().strip().partition(": ")
                if name == "event":
                    kind = value
                elif name == "data":
                    self.events.append((kind, json.loads(value)))
                elif line == b"0\r\n":
                    break
        self.ended.set()

    def close(self):
        """Hangs up."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        assert self.ended.wait(60)
        self._file.close()
        self._socket.close()

    def of(self, kind):
        return [data for each, data in self.events if each == kind]


@pytest.fixture
def listen():
    ears = []

    def begin(live, **headers):
        ears.append(Ear(live, **headers))
        return ears[-1]

    yield begin
    for ear in ears:
        ear.live.call(stream_of(ear.live).end)
        ear.close()


def stream_of(live):
    return live.app.state.overview.stream


def test_it_begins_with_an_overview_and_tells_what_changes(serve_stepped, listen, npy):
    live = serve_stepped()
    ear = listen(live)
    assert (ear.status, ear.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert (ear.headers["cache-control"], ear.headers["x-accel-buffering"]) == ("no-store", "no")
    (first,) = ear.of("overview")
    assert (first["ready"], first["failures"]) == (True, [])
    assert "history" not in first
    for _ in range(4):
        live.advance(1.0)
    assert len(ear.of("overview")) == 1, "nothing has changed"
    with live.http() as http:
        body = npy(np.ones(100))
        assert http.post("/v1/arrays", content=body, headers={"Content-Type": "application/x-npy"}).status_code == 201
    live.advance(0.5)
    live.advance(0.5)
    until(lambda: len(ear.of("overview")) == 2)
    assert ear.of("overview")[1]["memory"]["store"]["bytes"] == 800


def test_where_nothing_changes_it_is_said_again_after_a_while(serve_stepped, listen):
    live = serve_stepped()
    ear = listen(live)
    for _ in range(14):
        live.advance(1.0)
    assert len(ear.of("overview")) == 1
    for _ in range(2):
        live.advance(1.0)
    until(lambda: len(ear.of("overview")) == 2)
    first, second = ear.of("overview")
    assert {**first, "time": 0} == {**second, "time": 0}


def test_a_point_every_five_seconds(serve_stepped, listen):
    live = serve_stepped()
    ear = listen(live)
    for count in range(1, 4):
        for _ in range(5):
            live.advance(1.0)
        until(partial(lambda count: len(ear.of("point")) == count, count))
    with live.http() as http:
        history = http.get("/v1/overview?history=true").json()["history"]
    assert history["end"] == ear.of("point")[-1]["time"]
    assert [point["series"]["products"] for point in ear.of("point")] == history["series"]["products"][-3:]


def test_a_stream_outlives_the_limits_of_idle_connections(serve_stepped, listen):
    """Longer than any of them, on a connection that sends no request."""
    live = serve_stepped(keep_alive_s=2, head_timeout_s=2, send_stall_s=2, body_window_s=1)
    ear = listen(live)
    for _ in range(40):
        live.advance(1.0)
    until(lambda: len(ear.of("point")) >= 8)
    assert not ear.ended.is_set()


def test_one_rendering_for_all_of_equal_rights(serve_stepped, listen, monkeypatch):
    live = serve_stepped()
    ears = [listen(live) for _ in range(10)]
    rendered = []
    overview = snapshot_module.Snapshot.overview

    def count(self, view):
        rendered.append(view)
        return overview(self, view)

    monkeypatch.setattr(snapshot_module.Snapshot, "overview", count)
    for _ in range(16):
        live.advance(1.0)
    until(lambda: all(len(ear.of("overview")) == 2 for ear in ears))
    assert len(rendered) <= 16


def test_without_listeners_nothing_is_looked_at(serve_stepped, listen, monkeypatch):
    live = serve_stepped()
    ear = listen(live)
    ear.close()
    for _ in range(10):  # who has hung up shows at the second of two points
        live.advance(1.0)
    until(lambda: stream_of(live).listeners == 0)
    live.advance(1.0)
    monkeypatch.setattr(snapshot_module.Snapshot, "overview", lambda *_: pytest.fail("looked at"))
    for _ in range(20):
        live.advance(1.0)
    assert not stream_of(live)._looking
    assert not stream_of(live)._said


def test_a_listener_that_does_not_read_is_dropped(live, listen):
    """However much there is to say, only what fits the buffers, and eight events, are kept for it."""
    reader = listen(live)
    stream = stream_of(live)
    mib = b": " + b"x" * (1 << 20) + b"\n\nevent: mark\ndata: 1\n\n"
    with live.connect(receive_buffer=4096) as deaf:
        deaf.sendall(b"GET /v1/overview/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        until(lambda: stream.listeners == 2)
        sent = 0
        while stream.listeners == 2:
            assert sent < 40
            live.call(lambda: stream._put(stream._listeners, mib))
            sent += 1
            until(partial(lambda sent: len(reader.of("mark")) == sent, sent))
        assert not reader.ended.is_set(), "who reads goes on"


def test_what_waits_for_a_listener_is_bounded():
    listener = Listener(ANYONE)
    for number in range(8):
        listener.put(b"%d" % number)
    assert (len(listener._events), listener.ended) == (8, False)
    listener.put(b"8")
    assert (len(listener._events), listener.ended) == (0, True)
    listener.put(b"9")
    assert len(listener._events) == 0


def test_it_ends_when_the_server_drains(live, listen, problem):
    ear = listen(live)
    asyncio.run_coroutine_threadsafe(live.core.drain(0), live.core_loop).result(60)
    assert ear.ended.wait(60)
    last = ear.of("overview")[-1]
    assert (last["state"], last["ready"]) == ("draining", False)
    assert last["reasons"][0]["remedy"]
    until(lambda: stream_of(live).listeners == 0)
    with live.http() as http:
        problem(http.get("/v1/overview/stream"), 503, "draining")
        assert http.get("/v1/overview").json()["state"] == "draining"


def test_so_many_listeners_and_no_more(live, problem):
    def join():
        for _ in range(MAX_LISTENERS):
            stream_of(live)._listeners.add(Listener(ANYONE))

    live.call(join)
    with live.http() as http:
        answer = http.get("/v1/overview/stream")
        problem(answer, 503, "too-many-connections")
        assert answer.headers["retry-after"] == "5"
    live.call(stream_of(live)._listeners.clear)


def test_one_owners_listeners_leave_room_for_others(settings, serve, listen, problem):
    _, alice = create_key(settings.data_dir, "alice")
    _, bob = create_key(settings.data_dir, "bob")
    live = serve()
    ear = listen(live, Authorization=f"Bearer {alice}")
    (caller,) = [listener.caller for listener in stream_of(live)._listeners]

    def join():
        for _ in range(MAX_LISTENERS_OF_OWNER - 1):
            stream_of(live)._listeners.add(Listener(caller))

    live.call(join)
    with live.http() as http:
        problem(
            http.get("/v1/overview/stream", headers={"Authorization": f"Bearer {alice}"}), 503, "too-many-connections"
        )
        problem(http.get("/v1/overview/stream"), 401, "unauthorized")
    other = listen(live, Authorization=f"Bearer {bob}")
    assert other.status == 200
    assert not ear.ended.is_set()


def test_a_stream_ends_with_its_key(settings, serve, listen):
    key_id, alice = create_key(settings.data_dir, "alice", scopes=[Scope.READ])
    _, bob = create_key(settings.data_dir, "bob", scopes=[Scope.READ])
    live = serve()
    ear, other = listen(live, Authorization=f"Bearer {alice}"), listen(live, Authorization=f"Bearer {bob}")
    assert ear.status == other.status == 200
    revoke_key(settings.data_dir, key_id)
    live.call(live.core.keyring.refresh)
    assert ear.ended.wait(60)
    assert not other.ended.is_set()


def test_the_first_key_ends_the_streams_of_those_without(settings, serve, listen):
    live = serve()
    ear = listen(live)
    create_key(settings.data_dir, "alice")
    live.call(live.core.keyring.refresh)
    assert ear.ended.wait(60)


def test_a_client_that_has_ended_its_side_is_told_on(serve_stepped):
    """As with `curl` behind a closed pipe, or a proxy: half-closed is not gone. Who is gone shows at the next event."""
    live = serve_stepped()
    with live.connect() as connection:
        connection.sendall(b"GET /v1/overview/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        data = b""
        while b"event: overview" not in data:
            piece = connection.recv(65536)
            assert piece, data
            data += piece
        assert b"HTTP/1.1 200 " in data
        assert b"transfer-encoding: chunked" in data
    for _ in range(10):
        live.advance(1.0)
    until(lambda: stream_of(live).listeners == 0)


def test_head_is_answered_and_ends(live):
    with live.http() as http:
        answer = http.head("/v1/overview/stream")
        assert (answer.status_code, answer.content) == (200, b"")
        assert http.get("/livez").status_code == 200
    until(lambda: stream_of(live).listeners == 0)
