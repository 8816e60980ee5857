"""Slow, large, many and stalled: what hostile connections cost, and that they keep nobody else out."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import shutil
import socket
import ssl
import subprocess
import time

import httpx
import numpy as np
import pytest

from gemmserve_service.api_keys import Quota
from gemmserve_service.keyring import create_key

GET = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def until(condition, within_s=30.0):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def read_all(connection):
    """Until the other side closes."""
    data = b""
    connection.settimeout(30)
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            data += piece
    return data


def answer_of(data):
    """Status, headers and problem of a whole answer."""
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    assert int(headers["content-length"]) == len(body)
    return int(lines[0].split()[1]), headers, json.loads(body)


def closed(connection):
    return read_all(connection) == b""


class TestHeads:
    @pytest.fixture
    def live(self, serve):
        return serve(head_timeout_s=0.6, max_head_bytes=4096)

    def test_a_silent_connection_is_closed(self, live):
        with live.connect() as connection:
            began = time.monotonic()
            assert closed(connection)
            assert 0.3 < time.monotonic() - began < 20

    def test_a_trickling_head_is_cut_off(self, live):
        with live.connect() as connection:
            connection.settimeout(0.1)
            answer = b""
            for byte in GET * 3:
                connection.sendall(bytes([byte]))
                with contextlib.suppress(TimeoutError):
                    answer = connection.recv(65536)
                    break
            status, headers, problem = answer_of(answer + read_all(connection))
        assert (status, headers["connection"], problem["type"]) == (408, "close", "/problems/request-timeout")
        assert headers["content-type"] == "application/problem+json"

    def test_a_trickling_head_after_a_request_is_cut_off_too(self, live):
        with live.connect() as connection:
            connection.sendall(GET)
            until(lambda: b'"status"' in connection.recv(65536))
            connection.sendall(GET[:10])
            assert answer_of(read_all(connection))[0] == 408

    def test_a_finished_request_may_pause(self, live):
        """Keep-alive is longer than the time that a head may take."""
        with live.connect() as connection:
            for _ in range(2):
                connection.sendall(GET)
                until(lambda: b'"status"' in connection.recv(65536))
                time.sleep(1.2)

    @pytest.mark.parametrize(
        "head",
        [
            b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: " + b"x" * 5000 + b"\r\n\r\n",
            b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X-A: b\r\n" * 700 + b"\r\n",
            b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
            b"GET /livez?" + b"x" * 50_000,
            b"GET /livez HTTP/1.1\r\nX-Endless: " + b"x" * 50_000,
        ],
        ids=["one field", "many fields", "path", "endless query", "endless field"],
    )
    @pytest.mark.parametrize("piece", [1 << 20, 1000])
    def test_a_large_head_is_refused(self, live, head, piece):
        with live.connect() as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for start in range(0, len(head), piece):
                connection.sendall(head[start : start + piece])
                time.sleep(0.001)
            if piece < len(head) or head.endswith(b"\r\n\r\n"):
                status, _, problem = answer_of(read_all(connection))
                assert (status, problem["type"]) == (431, "/problems/head-too-large")
        metrics = httpx.get(f"{live.url}/metrics").text
        if piece < len(head) or head.endswith(b"\r\n\r\n"):
            assert 'gemmserve_http_refused_connections_total{problem="head-too-large"} 1.0' in metrics

    def test_a_head_of_just_the_limit_is_taken(self, live):
        fixed = len(b"/livez") + len(b"Host: 127.0.0.1\r\n") + len(b"X: \r\n")
        value = b"x" * (4096 - fixed)
        with live.connect() as connection:
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + value + b"\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")

    def test_endless_trailers_are_cut_off(self, live):
        head = b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
        with live.connect() as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(head)
            for _ in range(100_000):
                connection.sendall(b"X-Trailer: " + b"x" * 100 + b"\r\n")
            pytest.fail("the connection took 11 MB of trailers")
        metrics = httpx.get(f"{live.url}/metrics").text
        assert 'gemmserve_http_refused_connections_total{problem="head-too-large"} 1.0' in metrics


def upload_head(nbytes, **headers):
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return (
        "POST /v1/arrays?dtype=float64&shape=" + str(nbytes // 8) + " HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Content-Type: application/octet-stream\r\nContent-Length: {nbytes}\r\n" + "".join(f"{x}\r\n" for x in lines)
    ).encode() + b"\r\n"


class TestBodies:
    @pytest.fixture
    def live(self, serve):
        return serve(head_timeout_s=0.6, body_window_s=0.5, min_body_rate=1000)

    def test_a_byte_now_and_then_is_cut_off_and_its_space_freed(self, live):
        with live.connect() as connection:
            connection.sendall(upload_head(1 << 20))
            until(lambda: live.core.store.used_bytes == 1 << 20)
            connection.settimeout(0.05)
            answer = b""
            for _ in range(100):
                connection.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    answer = connection.recv(65536)
                    break
            status, headers, problem = answer_of(answer + read_all(connection))
        assert (status, headers["connection"], problem["type"]) == (408, "close", "/problems/request-timeout")
        assert live.core.store.used_bytes == 0
        assert live.core.quotas.inflight_bytes("") == 0

    def test_fast_at_first_is_no_credit_for_ever(self, live):
        with live.connect() as connection:
            connection.sendall(upload_head(1 << 20) + bytes(1 << 19))
            assert answer_of(read_all(connection))[0] == 408

    def test_slow_but_fast_enough_is_let_finish(self, live):
        with live.connect() as connection:
            connection.sendall(upload_head(4000))
            for _ in range(10):
                connection.sendall(bytes(400))
                time.sleep(0.2)
            assert connection.recv(65536).startswith(b"HTTP/1.1 201")

    def test_parts_of_a_one_shot_too(self, live, npy, form):
        body, headers = form([("a", npy(np.ones((100, 100)))), ("b", npy(np.ones((100, 100))))])
        head = (
            "POST /v1/gemm HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Content-Type: {headers['Content-Type']}\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        with live.connect() as connection:
            connection.sendall(head + body[: len(body) // 2])
            assert answer_of(read_all(connection))[0] == 408
        assert live.core.store.scratch_bytes == 0
        assert live.core.quotas.scratch_bytes("") == 0

    def test_the_rest_of_a_refused_body_is_not_waited_for(self, live):
        """It is answered at once; who then trickles on holds a connection, and loses it."""
        with live.connect() as connection:
            connection.sendall(b"POST /v1/nothing HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\n\r\n")
            until(lambda: b"not-found" in connection.recv(65536))
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                for _ in range(100):
                    connection.sendall(b"x")
                    time.sleep(0.05)
                pytest.fail("the connection stayed open")

    def test_a_quota_is_given_back_to_its_owner(self, live, settings):
        _, text = create_key(settings.data_dir, "alice", quota=Quota(stored_bytes=1 << 20, inflight_bytes=1 << 20))
        owner = text.split("_")[1]
        until(lambda: live.core.keyring.current.closed)
        head = upload_head(1 << 20, Authorization=f"Bearer {text}")
        with live.connect() as connection:
            connection.sendall(head + b"x")
            until(lambda: live.core.quotas.inflight_bytes(owner) == 1 << 20)
            with live.connect() as other:
                other.sendall(head)
                assert answer_of(read_all(other))[2]["type"] == "/problems/quota-exceeded"
            assert answer_of(read_all(connection))[0] == 408
        until(lambda: live.core.quotas.inflight_bytes(owner) == 0)
        assert live.core.quotas.stored_bytes(owner) == 0


def test_who_does_not_take_an_answer_is_cut_off(serve, npy):
    live = serve(send_stall_s=0.6)
    with httpx.Client(base_url=live.url) as client:
        info = client.post(
            "/v1/arrays", content=npy(np.zeros(4 << 20)), headers={"Content-Type": "application/x-npy"}
        ).json()
        with live.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(f"GET /v1/arrays/{info['id']}/data HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            connection.recv(100)
            client.delete(f"/v1/arrays/{info['id']}")
            assert live.core.store.used_bytes > 0  # the download holds it
            until(lambda: live.core.store.used_bytes == 0)


def test_a_slow_reader_that_goes_on_reading_gets_it_all(serve, npy):
    live = serve(send_stall_s=0.6)
    with httpx.Client(base_url=live.url) as client:
        array = np.random.default_rng(0).standard_normal(1 << 20)
        info = client.post("/v1/arrays", content=npy(array), headers={"Content-Type": "application/x-npy"}).json()
        received = b""
        with client.stream("GET", f"/v1/arrays/{info['id']}/data") as answer:
            for piece in answer.iter_raw(1 << 20):
                received += piece
                time.sleep(0.2)
        assert received[-array.nbytes :] == array.tobytes()


class TestNumbers:
    def test_idle_connections_make_way(self, serve):
        live = serve(max_connections_per_address=20, head_timeout_s=60)
        with contextlib.ExitStack() as stack:
            idle = [stack.enter_context(live.connect()) for _ in range(60)]
            for connection in idle[20:]:
                connection.sendall(b"GET /livez HTTP/1.1\r\n")  # of which 20 are in the middle of a head
            with httpx.Client(base_url=live.url) as client:
                assert all(client.get("/livez").status_code == 200 for _ in range(5))
            assert all(closed(connection) for connection in idle[:39])
            idle[-1].sendall(b"Host: 127.0.0.1\r\n\r\n")
            assert idle[-1].recv(65536).startswith(b"HTTP/1.1 200")

    @pytest.mark.parametrize("limits", [{"max_connections_per_address": 10}, {"max_connections": 10}])
    def test_connections_within_a_request_do_not(self, serve, limits):
        live = serve(body_window_s=60, **limits)
        with contextlib.ExitStack() as stack:
            busy = [stack.enter_context(live.connect()) for _ in range(10)]
            for connection in busy:
                connection.sendall(upload_head(800))
            until(lambda: live.core.store.used_bytes == 8000)
            with live.connect() as refused:
                status, headers, problem = answer_of(read_all(refused))
                assert (status, problem["type"]) == (503, "/problems/too-many-connections")
                assert int(headers["retry-after"]) >= 1
            for connection in busy:
                connection.sendall(bytes(800))
                assert connection.recv(65536).startswith(b"HTTP/1.1 201")
            assert httpx.get(f"{live.url}/livez").status_code == 200

    def test_a_thousand_idle_connections_hinder_nobody(self, serve):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard < 4096:
            pytest.skip(f"this process may open {hard} files only")
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
        live = serve(head_timeout_s=60)
        with contextlib.ExitStack() as stack:
            stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
            for index in range(1000):
                connection = stack.enter_context(live.connect())
                if index % 2:
                    connection.sendall(b"POST /v1/gemm HTTP/1.1\r\nHost: 127.0.0.1\r\n")
            with httpx.Client(base_url=live.url, timeout=30) as client:
                began = time.monotonic()
                for _ in range(20):
                    assert client.get("/v1/arrays").status_code == 200
                assert time.monotonic() - began < 20

    def test_an_idle_connection_ends_after_keep_alive(self, serve):
        live = serve(keep_alive_s=0.3)
        with live.connect() as connection:
            connection.sendall(GET)
            until(lambda: b'"status"' in connection.recv(65536))
            assert closed(connection)

    def test_requests_sent_ahead_are_answered_in_order(self, serve):
        live = serve(head_timeout_s=0.6)
        with live.connect() as connection:
            connection.sendall(GET + GET.replace(b"livez", b"nope") + GET + GET[:7])
            data = read_all(connection)
        assert re.findall(rb"HTTP/1.1 (\d+)", data) == [b"200", b"404", b"200", b"408"]


def test_a_trusted_proxy_speaks_for_others(serve, settings):
    create_key(settings.data_dir, "alice")
    live = serve(trusted_proxies=["127.0.0.0/8"], max_connections_per_address=3)
    seen = []
    live.app.state.audit.write = lambda **fields: seen.append(fields.get("address"))
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(live.connect())
        httpx.get(f"{live.url}/v1/arrays", headers={"X-Forwarded-For": "203.0.113.9"})
    until(lambda: seen)  # written once the answer is out
    assert seen == ["203.0.113.9"]


def test_others_do_not_speak_for_themselves(serve, settings):
    create_key(settings.data_dir, "alice")
    live = serve()
    seen = []
    live.app.state.audit.write = lambda **fields: seen.append(fields.get("address"))
    httpx.get(f"{live.url}/v1/arrays", headers={"X-Forwarded-For": "203.0.113.9"})
    until(lambda: seen)
    assert seen == ["127.0.0.1"]


def test_handshakes_that_do_not_end_are_cut_off(serve, tmp_path):
    """With TLS a connection costs something before its first request; others go on meanwhile."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=x -keyout key -out cert"
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*make.split(), *names], cwd=tmp_path, check=True, capture_output=True)
    live = serve(tls_certificate=tmp_path / "cert", tls_key=tmp_path / "key", head_timeout_s=0.6)
    trust = ssl.create_default_context(cafile=tmp_path / "cert")
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(live.connect()) for _ in range(50)]
        for connection in silent[::2]:
            connection.sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a ClientHello
        with httpx.Client(base_url=f"https://127.0.0.1:{live.port}", verify=trust) as client:
            assert client.get("/livez").status_code == 200
        assert all(closed(connection) for connection in silent)
