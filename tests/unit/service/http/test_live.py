"""What only a real socket shows: Expect, hanging up, framing, memory while streaming."""

from __future__ import annotations

import hashlib
import io
import json
import socket
import time

import numpy as np
import pytest
from raw_connection import closed, until


@pytest.fixture
def http(live):
    with live.http() as client:
        yield client


def request_head(method, path, **headers):
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1"] + [
        f"{name.replace('_', '-')}: {value}" for name, value in headers.items()
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def read_head(connection):
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        assert piece, data
        data += piece
    head, _, rest = data.partition(b"\r\n\r\n")
    return head.decode(), rest


def upload_head(array_bytes, **headers):
    return request_head(
        "POST", "/v1/arrays", Content_Type="application/x-npy", Content_Length=len(array_bytes), **headers
    )


def test_expect_100_continue(live, npy):
    body = npy(np.ones((100, 100)))
    with live.connect() as connection:
        connection.sendall(upload_head(body, Expect="100-continue"))
        head, rest = read_head(connection)
        assert head.startswith("HTTP/1.1 100 ")
        assert rest == b""
        connection.sendall(body)
        assert read_head(connection)[0].startswith("HTTP/1.1 201 ")


def test_a_refusal_before_the_body_spares_the_body(live):
    with live.connect() as connection:
        connection.sendall(
            request_head(
                "POST", "/v1/arrays", Content_Type="application/x-npy", Content_Length=1 << 40, Expect="100-continue"
            )
        )
        head, _ = read_head(connection)
        assert head.startswith("HTTP/1.1 413 ")
        # The body may or may not follow: the connection cannot be used again.
        assert "connection: close" in head.lower()
        assert closed(connection)


def test_hanging_up_within_an_upload_frees_its_space(live, http, npy):
    body = npy(np.ones((512, 512)))
    with live.connect() as connection:
        connection.sendall(upload_head(body) + body[: len(body) // 2])
        until(lambda: live.core.store.used_bytes == 512 * 512 * 8)
    until(lambda: live.core.store.used_bytes == 0)
    assert http.get("/v1/arrays").json()["items"] == []


def test_hanging_up_within_a_part_frees_its_space(live, npy, form):
    body, headers = form([("a", npy(np.ones((512, 512)))), ("b", npy(np.ones((512, 512))))])
    with live.connect() as connection:
        connection.sendall(
            request_head("POST", "/v1/gemm", Content_Type=headers["Content-Type"], Content_Length=len(body))
            + body[: len(body) * 3 // 4]
        )
        until(lambda: live.core.store.scratch_bytes + live.core.store.used_bytes >= 2 * 512 * 512 * 8)
    until(lambda: live.core.store.scratch_bytes + live.core.store.used_bytes == 0)
    assert live.executor.sent == []


def test_hanging_up_cancels_a_one_shot(live, http, npy, form):
    live.executor.hold = True
    body, headers = form([("a", npy(np.ones((64, 64)))), ("b", npy(np.ones((64, 64))))])
    with live.connect() as connection:
        connection.sendall(
            request_head("POST", "/v1/gemm", Content_Type=headers["Content-Type"], Content_Length=len(body)) + body
        )
        until(lambda: live.core.scheduler.queued + live.core.scheduler.running == 1)
    until(lambda: not live.core.scheduler._wanted())  # before the answer, not at the same moment
    live.executor.release()
    until(lambda: live.core.scheduler.queued + live.core.scheduler.running == 0)
    until(lambda: live.core.store.scratch_bytes == 0)
    until(lambda: 'route="/v1/gemm",status="499"' in http.get("/metrics").text)


def test_hanging_up_within_a_download_unpins(live, http, npy):
    array = np.random.default_rng(0).standard_normal((1024, 4096))
    info = http.post("/v1/arrays", content=npy(array), headers={"Content-Type": "application/x-npy"}).json()
    with live.connect(receive_buffer=1 << 16) as connection:
        connection.sendall(request_head("GET", f"/v1/arrays/{info['id']}/data"))
        connection.recv(1000)
        assert http.delete(f"/v1/arrays/{info['id']}").status_code == 204
        # Hidden, but its bytes are still on their way.
        assert live.core.store.used_bytes == array.nbytes
    until(lambda: live.core.store.used_bytes == 0)


def test_a_download_outlives_the_deletion(live, http, npy):
    array = np.random.default_rng(0).standard_normal((1024, 2048))
    info = http.post("/v1/arrays", content=npy(array), headers={"Content-Type": "application/x-npy"}).json()
    received = bytearray()
    with http.stream("GET", f"/v1/arrays/{info['id']}/data") as answer, live.http() as other:
        for index, piece in enumerate(answer.iter_raw()):
            received += piece
            if index == 0:
                other.delete(f"/v1/arrays/{info['id']}")
                # Another array comes: it must not get these bytes' place.
                other.post("/v1/arrays", content=npy(array * 0), headers={"Content-Type": "application/x-npy"})
    assert hashlib.sha256(received[-array.nbytes :]).digest() == hashlib.sha256(array.tobytes()).digest()


def test_chunked_bodies_are_refused_with_a_reason(http):
    def pieces():
        yield b"x" * 100

    answer = http.post("/v1/arrays", content=pieces(), headers={"Content-Type": "application/x-npy"})
    assert (answer.status_code, answer.json()["type"]) == (411, "/problems/length-required")


def test_several_results_are_sent_in_chunks(http, npy, form):
    body, headers = form(
        [
            ("params", b'{"reduce": ["sum", "max"], "return_c": true}'),
            ("a", npy(np.ones((300, 20)))),
            ("b", npy(np.ones((20, 900)))),
        ]
    )
    answer = http.post("/v1/gemm-reduce", content=body, headers=headers)
    assert answer.headers["transfer-encoding"] == "chunked"
    results = np.load(io.BytesIO(answer.content))
    assert np.array_equal(results["c"], np.full((300, 900), 20.0))
    assert np.array_equal(results["sum"], np.full(900, 6000.0))


def test_connections_are_kept_after_problems(http, npy):
    body = npy(np.ones(10)) + b"too long"
    for _ in range(3):
        answer = http.post("/v1/arrays", content=body, headers={"Content-Type": "application/x-npy"})
        assert answer.json()["type"] == "/problems/body-length"
        assert http.get("/livez").status_code == 200


def test_events_arrive_as_they_happen(live, npy):
    live.executor.hold = True
    with live.http() as client:
        ids = {
            name: client.post(
                "/v1/arrays", content=npy(np.eye(8)), headers={"Content-Type": "application/x-npy"}
            ).json()["id"]
            for name in ("a", "b")
        }
        job = client.post("/v1/jobs", json={"op": "gemm", **ids}).json()
        states = []
        with client.stream("GET", f"/v1/jobs/{job['id']}/events") as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    states.append(json.loads(line[6:])["state"])
                    if len(states) == 1:
                        live.executor.release()
        assert states[0] in {"queued", "running"}
        assert states[-1] == "succeeded"


def test_watchers_that_leave_are_forgotten(live, npy):
    live.executor.hold = True
    with live.http() as client:
        ids = {
            name: client.post(
                "/v1/arrays", content=npy(np.eye(8)), headers={"Content-Type": "application/x-npy"}
            ).json()["id"]
            for name in ("a", "b")
        }
        job = client.post("/v1/jobs", json={"op": "gemm", **ids}).json()
        with live.connect() as connection:
            connection.sendall(request_head("GET", f"/v1/jobs/{job['id']}/events"))
            assert read_head(connection)[0].startswith("HTTP/1.1 200 ")
        live.executor.release()
        assert client.get(f"/v1/jobs/{job['id']}", params={"wait": 60}).json()["state"] == "succeeded"


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/arrays HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: abc\r\n\r\n",
        b"GET /v1/arrays HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET /v1/arrays HTTP/1.1\r\n\r\n",
        b"NONSENSE\r\n\r\n",
    ],
)
def test_broken_requests_are_client_errors(live, http, head):
    with live.connect() as connection:
        connection.sendall(head)
        connection.shutdown(socket.SHUT_WR)
        answer, _ = read_head(connection)
        assert answer.split()[1] in {"400", "403"}
    assert http.get("/livez").status_code == 200


def test_a_body_that_was_gathered_in_vain_keeps_its_order(live, npy, form, read_npy):
    """What was read in the hope of a small body comes before what is still in the socket."""
    a = np.arange(12_000.0).reshape(120, 100)
    body, headers = form([("a", npy(a)), ("b", npy(np.eye(100)))])
    with live.connect() as connection:
        head = request_head("POST", "/v1/gemm", Content_Type=headers["Content-Type"], Content_Length=len(body))
        middle = len(body) - 100 * 100 * 8 - 500
        # The second piece follows at once, the third when the server has given the hope up.
        for piece, pause in ((head + body[:200], 0.005), (body[200:middle], 0.2), (body[middle:], 0)):
            connection.sendall(piece)
            time.sleep(pause)
        status, rest = read_head(connection)
        assert status.startswith("HTTP/1.1 200 "), rest
        while len(rest) < a.nbytes + 128:
            piece = connection.recv(1 << 20)
            assert piece, "the answer breaks off"
            rest += piece
    np.testing.assert_array_equal(read_npy(rest), a)
