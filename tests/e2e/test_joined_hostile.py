"""Callers of the join port, with or without a token: what the server refuses, and that nothing else notices."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest
from join_peer import JoinPeer, answer, frame
from live_server import LiveServer, until

from gemmserve import Client
from gemmserve_service.executor.join_protocol import GREETING, ReadExtent, WriteResult

if TYPE_CHECKING:
    from collections.abc import Iterator

N = 200
MIB = 1 << 20


def key(data_dir, scope: str) -> str:
    command = [sys.executable, "-m", "gemmserve.cli", "keys", "create", "--scope", scope, "--data-dir", str(data_dir)]
    return subprocess.run([*command, "test"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


class Closed:
    """A server with keys, and one node, which leaves for the time of a test."""

    def __init__(self, live: LiveServer, user: str, token: str) -> None:
        self.live, self.user, self.token, self.port = live, user, token, live.joined.port

    def client(self) -> Client:
        return Client(self.live.url, api_key=self.user)

    def peer(self, name: str = "peer", **fields) -> JoinPeer:
        return JoinPeer(self.port, name, **{"token": self.token, **fields})


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Closed]:
    folder = tmp_path_factory.mktemp("data")
    user, token = key(folder, "read,submit"), key(folder, "worker")
    environment = {"GEMMSERVE_JOIN_TOKEN": token, "GEMMSERVE_MAX_ATTEMPTS": "50"}
    with LiveServer(data_dir=folder, joins=["node"], environment=environment) as live:
        yield Closed(live, user, token)


@pytest.fixture
def alone(closed: Closed) -> Iterator[Closed]:
    """The server without any worker; afterwards its node computes whatever is still to be computed."""
    (agent,) = closed.live.joined.agents
    assert agent.end() == 0
    yield closed
    agent.start()
    closed.live.wait_ready()
    with closed.client() as client:
        assert np.array_equal((client.put(X) @ client.put(Y)).numpy(), X @ Y)


def whole_numbers(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-8, 9, (N, N)).astype(np.float32)


X, Y = whole_numbers(1), whole_numbers(2)


def said_before_the_end(port: int, data: bytes) -> bytes:
    """What the server says to these bytes until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(data)
        said = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(1 << 16):
                said += piece
    return said


JOIN = {"kind": "join", "protocol": 1, "name": "peer", "device": "cpu", "session": "0" * 16}


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 64 + b"\r\n\r\n",
        b"\r\n\r\n\r\n",
        bytes(range(128, 256)) * 32 + b"\r\n\r\n",
        GREETING + struct.pack(">I", (1 << 31) - 1),
        GREETING + struct.pack(">I", 0xFFFFFFFF),
        GREETING + struct.pack(">I", 1 << 20),
        GREETING + frame({"kind": "hello"}),
        GREETING + frame({"kind": "run_batch", "tasks": []}),
        GREETING + frame({**JOIN, "more": 1}),
        GREETING + frame({**JOIN, "name": "../../etc"}),
        GREETING + frame({**JOIN, "name": "x" * 10_000}),
        GREETING + frame({**JOIN, "device": "cpu:0/../.."}),
        GREETING + frame({**JOIN, "cache_bytes": -1}),
        GREETING + frame({**JOIN, "link_bytes_s": "NaN"}),
        GREETING + frame({**JOIN, "token": "gs_" + "0" * 400}),
        GREETING + frame(JOIN),
        GREETING + b"\0\0\0\2[]",
        GREETING + b"\0\0\0\0",
        GREETING + struct.pack(">I", 16_000) + b"[" * 16_000,
        GREETING + b"\0\0\0\4" + b"\xff\xfe\xfd\xfc",
        GREETING.replace(b"/1", b"/9") + frame(JOIN) + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /v1/arrays HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /metrics HTTP/1.0\r\n\r\n",
        b"PUT /internal/results/t/1/e?offset=0 HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nabcd",
        b"PUT /internal/probe HTTP/1.1\r\nHost: x\r\nContent-Length: 8388608\r\n\r\n",
        b"GET /internal/probe?length=8388608 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /internal/probe?length=1 HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
        b"PUT /internal/probe HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"PUT /internal/probe HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=str,
)
def test_who_has_no_token_gets_nothing_but_the_end(closed: Closed, data: bytes) -> None:
    said = said_before_the_end(closed.port, data)
    assert not said.startswith(b"HTTP/1.1 2")
    assert b'"joined"' not in said
    assert len(said) < 4096
    with closed.live.http() as http:
        assert http.get("/livez").status_code == 200


def test_keys_are_for_what_their_scope_says(closed: Closed) -> None:
    """A user's key does not join, and a worker's token does nothing else."""
    for token in (closed.user, "", None, closed.token[:-1], closed.token + "0"):
        with pytest.raises(PermissionError) as refused, closed.peer(token=token):
            pass
        assert refused.value.args[0] == "token"
        assert closed.user not in str(refused.value)
    with closed.live.http() as http:
        headers = {"Authorization": f"Bearer {closed.token}"}
        for method, path in [
            ("GET", "/v1/arrays"), ("GET", "/v1/jobs"), ("GET", "/v1/devices"), ("GET", "/v1/usage"),
            ("POST", "/v1/arrays?dtype=float32&shape=1"), ("POST", "/v1/gemm"), ("POST", "/v1/jobs"),
            ("DELETE", "/v1/arrays/arr_00000000000000000000000000"), ("GET", "/v1/overview"), ("GET", "/metrics"),
        ]:  # fmt: skip
            assert http.request(method, path, headers=headers).status_code == 403, (method, path)


def test_a_revoked_token_joins_no_more(closed: Closed) -> None:
    token = key(closed.live.data_dir, "worker")

    def joins() -> bool:
        try:
            with closed.peer("short-lived", token=token):
                return True
        except PermissionError:
            return False

    until(joins)
    with closed.peer("short-lived", token=token) as peer:
        key_id = [word for word in token.split("_") if word][1] if token.count("_") > 1 else token[:16]
        subprocess.run(
            [sys.executable, "-m", "gemmserve.cli", "keys", "revoke", key_id, "--data-dir", str(closed.live.data_dir)],
            check=True,
        )
        assert peer.ended.wait(60), "the link of a token that was revoked is closed"
        assert peer.exchange("GET", "/internal/probe?length=1")[0] in {401, 403, 409, 410}
    until(lambda: not joins())


def test_a_link_sees_what_its_tasks_read_and_nothing_else(alone: Closed) -> None:
    with alone.client() as client, alone.peer() as peer, alone.peer("other") as other:
        secret = client.put(np.full((N, N), 42, np.float32))
        a, b = client.put(X), client.put(Y)
        peer.hello()
        job = client.submit("gemm", a, b)
        work = peer.task()
        assert peer.get(work, "a") == (200, X.tobytes())
        assert peer.get(work, "b") == (200, Y.tobytes())
        assert other.get(work, "a")[0] == 410
        extent, offset, nbytes = work.place("a")
        for far in (ReadExtent(extent, offset, 1 << 40), ReadExtent(extent, 1 << 40, 16)):
            assert peer.exchange("GET", far.target)[0] in {400, 403, 410, 416}
        for target in (
            f"/internal/extents/{secret.id}?offset=0&length=16",
            "/internal/extents/..%2F..%2Fetc%2Fpasswd?offset=0&length=16",
            "/internal/extents/%2Fetc%2Fpasswd?offset=0&length=16",
            f"/internal/extents/{extent}?offset=-1&length=16",
            f"/internal/extents/{extent}?offset=0&length=99999999999999999999",
            f"/internal/extents/{extent}?offset=0&length=0x10",
            f"/internal/extents/{extent}?offset=0&length=16&length=32",
            f"/internal/extents/{extent}",
            "/internal/extents/?offset=0&length=16",
            "/internal/extents/%00?offset=0&length=16",
            "/internal/extents/%ff?offset=0&length=16",
        ):
            assert peer.exchange("GET", target)[0] in {400, 403, 404, 410, 416}, target
        for wrong in ("", "0" * 32, alone.token, alone.user, other.secret):
            status = peer.exchange("GET", ReadExtent(extent, offset, nbytes).target, secret=wrong)[0]
            assert status in {401, 403, 410}, wrong
        assert peer.put(work, "d", (X @ Y).tobytes()) == 204
        peer.done(work)
        job.wait()
        assert np.array_equal(job.result().numpy(), X @ Y)
        assert peer.get(work, "a")[0] == 410  # the task is over


def test_a_link_writes_to_its_results_and_nowhere_else(alone: Closed) -> None:
    with alone.client() as client, alone.peer() as peer, alone.peer("other") as other:
        a, b = client.put(X), client.put(Y)
        peer.hello()
        job = client.submit("gemm", a, b)
        work = peer.task()
        evil = np.full((N, N), np.nan, np.float32).tobytes()
        assert peer.put(work, "a", evil) == 403
        extent, offset, _nbytes = work.place("d")

        def put(data: bytes = evil, by: JoinPeer = peer, **fields) -> int:
            asked = {"task": work.task, "attempt": work.attempt, "extent": extent, "offset": offset} | fields
            return by.exchange("PUT", WriteResult(**asked).target, data)[0]

        refused = {400, 403, 409, 411, 413, 416}
        assert put(by=other) == 409
        assert put(attempt=work.attempt + 1) == 409
        assert put(task="job_00000000000000000000000000") == 409
        assert put(extent="nothing") == 403
        assert put(offset=offset + 1) == 403
        assert put(evil + b"\0") == 403
        assert put(offset=1 << 61) == 403
        assert put(evil, rows=N, stride=1 << 40) in refused
        assert put(evil, rows=N, stride=4 * N + 4) in refused
        assert put(evil, rows=3, stride=4) in refused  # rows that overlap, and do not divide the body
        assert put(evil, rows=1 << 40, stride=1) in refused
        assert put((X @ Y).tobytes()) == 204
        peer.done(work)
        job.wait()
        assert np.array_equal(job.result().numpy(), X @ Y)
        assert np.array_equal(a.numpy(), X)
        assert np.array_equal(b.numpy(), Y)


def test_done_without_all_of_the_result_is_no_result(alone: Closed) -> None:
    """Memory that was another's must not become the result of a worker that says it is done and has sent nothing."""
    with alone.client() as client:
        a, b = client.put(X), client.put(Y)
        parts = (b"", (X @ Y).tobytes()[:-4096])
        jobs = []
        for number, sent in enumerate(parts):
            with alone.peer(f"liar{number}") as peer:
                peer.hello()
                jobs.append(client.submit("gemm", a, b, alpha=number + 1))
                work = peer.task()
                if sent:
                    assert peer.put(work, "d", sent) == 204
                peer.done(work)
                peer.ended.wait(5)
                assert client.job(jobs[-1].id).state != "succeeded"
        (agent,) = alone.live.joined.agents
        agent.start()
        for number, job in enumerate(jobs):
            job.wait()
            assert np.array_equal(job.result().numpy(), (number + 1) * (X @ Y))


def test_answers_of_tasks_that_it_has_not_change_nothing(alone: Closed) -> None:
    with alone.client() as client:
        a, b = client.put(X), client.put(Y)
        with alone.peer() as peer, alone.peer("other") as other:
            peer.hello()
            job = client.submit("gemm", a, b)
            work = peer.task()
            other.hello()
            other.done(work)
            other.send(
                frame({"kind": "failed", "task": work.task, "slug": "x", "status": 500, "title": "", "detail": ""})
            )
            other.send(frame({"kind": "written", "tasks": [work.task], "lost": []}))
            other.send(frame({"kind": "kept", "came": [a.id, "arr_nothing"], "budget": 1 << 60}))
            with contextlib.suppress(OSError):
                other.inline(work, "d", b"\xff" * 64)
            assert peer.put(work, "d", (X @ Y).tobytes()) == 204
            assert client.job(job.id).state == "running"
            peer.done(work)
            peer.done(work)
            job.wait()
            assert np.array_equal(job.result().numpy(), X @ Y)


@pytest.mark.parametrize(
    "said",
    [
        {"kind": "hello", "worker": "cpu", "pid": 1, "spec": {}, "verified_error": 0.0},
        {"kind": "joined"},
        {"kind": "nothing"},
        {"kind": "kept", "came": ["x" * 1000] * 1000, "used": "much"},
        {"kind": "rate", "bytes_s": -1.0},
        {"kind": "rate", "bytes_s": "Infinity"},
    ],
)
def test_nonsense_ends_the_link_and_nothing_more(closed: Closed, said: dict) -> None:
    with closed.peer() as peer:
        peer.hello()
        peer.send(frame(said))
        assert peer.ended.wait(60)
    with closed.client() as client:
        assert np.array_equal((client.put(X) @ client.put(Y)).numpy(), X @ Y)


def test_many_that_say_nothing_keep_nobody_out(closed: Closed) -> None:
    """Idle and half-open connections cost little, and those who have a token still join."""
    (front,) = [closed.live.front()]
    before = psutil.Process(front.pid).memory_info().rss
    idle = []
    try:
        for number in range(300):
            idle.append(socket.create_connection(("127.0.0.1", closed.port), timeout=120))
            if number % 3 == 1:
                idle[-1].sendall(GREETING + struct.pack(">I", 8000) + b"{")
            elif number % 3 == 2:
                idle[-1].sendall(b"PUT /internal/results/t/1/e?offset=0 HTTP/1.1\r\nContent-Le")
        with closed.peer("late") as peer:
            assert peer.exchange("GET", "/internal/probe?length=16")[0] == 200
        assert psutil.Process(front.pid).memory_info().rss - before < 64 * MIB
        with closed.client() as client:
            assert np.array_equal((client.put(X) @ client.put(Y)).numpy(), X @ Y)
    finally:
        for each in idle:
            each.close()


def test_half_an_upload_holds_no_place_for_ever(alone: Closed) -> None:
    """A peer that begins to upload and stops is no reason for the job to wait once the peer is given up."""
    with alone.client() as client:
        a, b = client.put(X), client.put(Y)
        with alone.peer() as peer:
            peer.hello()
            job = client.submit("gemm", a, b)
            work = peer.task()
            data = np.full((N, N), np.nan, np.float32).tobytes()
            extent, offset, _ = work.place("d")
            half = peer.connection()
            target = WriteResult(work.task, work.attempt, extent, offset).target
            head = f"PUT {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {peer.secret}\r\n"
            half.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data[:5000])
        with alone.peer("second") as second:
            second.hello()
            again = second.task()
            assert second.put(again, "d", (X @ Y).tobytes()) == 204
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                half.sendall(data[5000:])
            assert answer(half)[0] in {0, 409}
            half.close()
            second.done(again)
            job.wait()
        assert np.array_equal(job.result().numpy(), X @ Y)
