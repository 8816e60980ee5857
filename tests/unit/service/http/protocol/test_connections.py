"""Large, many and foreign: what hostile connections cost, and that they keep nobody else out."""

from __future__ import annotations

import contextlib
import resource

import pytest
from raw_connection import answer_of, closed, read_all, until, upload_head

from gemmserve_service.tenancy.keyring import create_key


def metrics_of(live):
    with live.http() as client:
        return client.get("/metrics").text


class TestHeads:
    @pytest.fixture
    def live(self, serve):
        return serve(max_head_bytes=4096)

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
        with live.connect() as connection:
            with contextlib.suppress(ConnectionError):
                for start in range(0, len(head), piece):
                    connection.sendall(head[start : start + piece])
                    live.call(lambda: None)  # so that it mostly comes in pieces
            if piece < len(head) or head.endswith(b"\r\n\r\n"):
                status, _, problem = answer_of(read_all(connection))
                assert (status, problem["type"]) == (431, "/problems/head-too-large")
        metrics = metrics_of(live)
        if piece < len(head) or head.endswith(b"\r\n\r\n"):
            assert 'gemmserve_http_refused_connections_total{problem="head-too-large"} 1.0' in metrics

    def test_a_head_of_just_the_limit_is_taken(self, live):
        fixed = len(b"/livez") + len(b"Host: 127.0.0.1\r\n") + len(b"X: \r\n")
        value = b"x" * (4096 - fixed)
        with live.connect() as connection:
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + value + b"\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")

    def test_nothing_is_kept_of_heads_that_are_whole(self, live):
        """Though each piece ends in the middle of another."""
        get = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        with live.connect() as connection:
            connection.sendall(get[:10])
            for _ in range(300):
                connection.sendall(get[10:] + get[:10])
                assert connection.recv(65536).startswith(b"HTTP/1.1 200")
            idle = live.connection_class.registry._idle
            until(lambda: len(idle) == 1)
            (one,) = idle
            assert len(one._parser._raw) <= 2 * len(get)

    def test_endless_trailers_are_cut_off(self, live):
        head = b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
        with live.connect() as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(head)
            for _ in range(100_000):
                connection.sendall(b"X-Trailer: " + b"x" * 100 + b"\r\n")
            pytest.fail("the connection took 11 MB of trailers")
        metrics = metrics_of(live)
        assert 'gemmserve_http_refused_connections_total{problem="head-too-large"} 1.0' in metrics


class TestNumbers:
    def test_idle_connections_make_way(self, serve):
        live = serve(max_connections_per_address=20, head_timeout_s=60)
        with contextlib.ExitStack() as stack:
            idle = [stack.enter_context(live.connect()) for _ in range(60)]
            for connection in idle[20:]:
                connection.sendall(b"GET /livez HTTP/1.1\r\n")  # of which 20 are in the middle of a head
            with live.http() as client:
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
            with live.http() as client:
                assert client.get("/livez").status_code == 200

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
            with live.http() as client:
                for _ in range(20):
                    assert client.get("/v1/arrays").status_code == 200


def get_for_another(live):
    with live.http() as client:
        client.get("/v1/arrays", headers={"X-Forwarded-For": "203.0.113.9"})


def test_a_trusted_proxy_speaks_for_others(serve, settings):
    create_key(settings.data_dir, "alice")
    live = serve(trusted_proxies=["127.0.0.0/8"], max_connections_per_address=3)
    seen = []
    live.app.state.audit.write = lambda **fields: seen.append(fields.get("address"))
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(live.connect())
        get_for_another(live)
    until(lambda: seen)  # written once the answer is out
    assert seen == ["203.0.113.9"]


def test_others_do_not_speak_for_themselves(serve, settings):
    create_key(settings.data_dir, "alice")
    live = serve()
    seen = []
    live.app.state.audit.write = lambda **fields: seen.append(fields.get("address"))
    get_for_another(live)
    until(lambda: seen)
    assert seen == ["127.0.0.1"]
