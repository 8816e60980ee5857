"""What the connection itself refuses is a problem like any other, in its turn; and what is unusual there but right."""

from __future__ import annotations

import contextlib
import json
import re
import socket

import numpy as np
import pytest
from raw_connection import Raw, answer_of, closed, eventually, read_all, until, upload_head

from gemmserve_service.errors import ServiceError
from gemmserve_service.http.protocol import half_close
from gemmserve_service.http.protocol.request_heads import check_head, describe_parser_error
from gemmserve_service.tenancy.keyring import create_key

GET = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
HOST = [(b"host", b"127.0.0.1:8000")]


class TestTargets:
    @pytest.mark.parametrize(
        ("target", "found"),
        [
            (b"/", b"/"),
            (b"/a?b=c", b"/a?b=c"),
            (b"//example.org/a", b"//example.org/a"),
            (b"http://127.0.0.1:8000/a?b", b"/a?b"),
            (b"HTTP://127.0.0.1:8000", b"/"),
            (b"https://127.0.0.1:8000?a=b", b"/?a=b"),
        ],
    )
    def test_become_paths(self, target, found):
        assert check_head("GET", target, "1.1", HOST) == found

    @pytest.mark.parametrize(
        "target", [b"*", b"/a#b", b"http://127.0.0.1/", b"http://127.0.0.1:8000/#", b"ftp://127.0.0.1:8000/", b"a/b"]
    )
    def test_refused(self, target):
        with pytest.raises(ServiceError):
            check_head("GET", target, "1.1", HOST)

    @pytest.mark.parametrize("hosts", [[], HOST * 2])
    def test_a_whole_url_needs_one_host(self, hosts):
        with pytest.raises(ServiceError):
            check_head("GET", b"http://127.0.0.1:8000/", "1.1", hosts)


@pytest.mark.parametrize(
    ("message", "status"),
    [("Content-Length overflow", 413), ("Pause on PRI/Upgrade", 505), ("Invalid character in chunk size", 400)],
)
def test_the_parser_s_messages(message, status):
    assert describe_parser_error(message).status == status


class TestRefusals:
    def test_count_and_line(self, serve, settings, tmp_path):
        create_key(settings.data_dir, "alice")
        live = serve(audit_log=tmp_path / "audit")
        with live.connect() as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nX-Request-Id: mine\r\nHost: 127.0.0.1\r\nBad Name: x\r\n\r\n")
            status, headers, problem = answer_of(read_all(connection))
        assert (status, problem["type"], headers["x-request-id"]) == (400, "/problems/invalid-request", "mine")
        assert headers["x-frame-options"] == "DENY"
        assert headers["date"]
        until((tmp_path / "audit").exists)
        line = json.loads((tmp_path / "audit").read_text())
        assert line.items() >= {
            "action": "connect", "outcome": "refused", "status": 400, "problem": "invalid-request",
            "address": "127.0.0.1", "request_id": "mine",
        }.items()  # fmt: skip
        metrics = live.app.state.metrics.render(None)[0].decode()
        assert 'gemmserve_http_refused_connections_total{problem="invalid-request"} 1.0' in metrics
        assert re.search(r'gemmserve_http_requests_total\{[^}]*route="unmatched"[^}]*status="400"[^}]*\} 1\.0', metrics)

    def test_in_its_turn(self, live):
        """Requests before it are answered first."""
        with contextlib.closing(Raw(live)) as connection:
            connection.socket.sendall(GET * 3 + b"nonsense\r\n\r\n" + GET)
            assert [connection.answer()[0] for _ in range(4)] == [200, 200, 200, 400]
            assert connection.answer() is None

    def test_of_a_body_that_waits_for_its_turn(self, live):
        chunked = b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
        with contextlib.closing(Raw(live)) as connection:
            connection.socket.sendall(GET + chunked + GET)
            assert [connection.answer()[0] for _ in range(2)] == [200, 400]
            assert connection.answer() is None

    def test_the_request_is_known_to_the_log_once(self, live):
        counted = []
        live.app.state.metrics.request_done = lambda *args, **_: counted.append(args)
        head = (
            b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nX-Request-Id: mine\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        with contextlib.closing(Raw(live)) as connection:
            connection.socket.sendall(head + b"2\r\n{}\r\n")
            until(lambda: live.tasks == 1)
            connection.socket.sendall(b"zz\r\n")
            status, headers, _ = connection.answer()
            assert (status, headers["x-request-id"]) == (400, "mine")
        until(lambda: counted)
        assert counted == [("/v1/jobs", "POST", 400)]

    @pytest.mark.parametrize("path", ["/livez", "/v1/jobs", "/v1/arrays", "/v1/gemm", "/v1/batch", "/v1/uploads", "/x"])
    @pytest.mark.parametrize("length", ["9" * 18, "9" * 30])
    def test_absurd_lengths(self, live, path, length):
        """At once, whatever the route would have done with the body."""
        with contextlib.closing(Raw(live)) as connection:
            connection.socket.sendall(
                f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {length}\r\n\r\nx".encode()
            )
            status, headers, body = connection.answer()
            assert (status, json.loads(body)["type"]) == (413, "/problems/too-large")
            assert headers["connection"] == "close"
            assert connection.answer() is None

    def test_who_goes_on_sending_reads_the_answer(self, live):
        """Not a reset of the connection."""
        with contextlib.closing(Raw(live)) as connection:
            head = b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 500000000\r\n\r\n"
            connection.socket.sendall(head + bytes(1 << 18))
            for _ in range(8):
                live.call(lambda: None)
                connection.socket.sendall(bytes(1 << 16))
            assert connection.answer()[0] == 413
            assert connection.answer() is None


class TestHalfClosed:
    @pytest.fixture(params=["HTTP/1.1", "HTTP/1.0"])
    def version(self, request):
        return request.param.encode()

    def test_gets_its_answer(self, live, version):
        with contextlib.closing(Raw(live)) as connection:
            connection.socket.sendall(GET.replace(b"HTTP/1.1", version))
            connection.socket.shutdown(socket.SHUT_WR)
            status, _, body = final(connection)
            assert status == 200
            assert json.loads(body)["status"] == "ok"
            assert connection.answer() is None

    def test_gets_all_of_its_answers(self, live):
        with contextlib.closing(Raw(live)) as connection:
            connection.socket.sendall(GET * 3 + b"GET /livez HT")
            connection.socket.shutdown(socket.SHUT_WR)
            assert [final(connection)[0] for _ in range(3)] == [200] * 3
            assert connection.answer() is None

    @pytest.mark.parametrize("patience_s", [0.01, 5.0])
    def test_gets_a_long_answer(self, live, version, patience_s, monkeypatch, npy):
        """However long it takes once it has begun."""
        monkeypatch.setattr(half_close, "_PATIENCE_S", patience_s)
        content = npy(np.zeros(4 << 20))
        with live.http() as http:
            sent = http.post("/v1/arrays", content=content, headers={"Content-Type": "application/x-npy"})
        path = f"/v1/arrays/{sent.json()['id']}/data".encode()
        with live.connect(receive_buffer=1 << 14) as connection:
            connection.sendall(b"GET " + path + b" " + version + b"\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            connection.recv(1, socket.MSG_PEEK)
            connection.shutdown(socket.SHUT_WR)
            assert read_all(connection).endswith(content[128:])

    def test_what_follows_does_not_cut_the_answer_off(self, live, npy, form):
        live.executor.hold = True
        content, headers = form([("a", npy(np.eye(4))), ("b", npy(np.eye(4)))])
        with contextlib.closing(Raw(live)) as connection:
            connection.send(content, headers | {"Connection": "close"})
            connection.socket.sendall(bytes(3 << 19))
            until(lambda: live.executor.sent)
            live.executor.release()
            assert connection.answer()[0] == 200

    def test_a_refusal_is_said_too(self, live):
        with contextlib.closing(Raw(live)) as connection:
            connection.socket.sendall(GET * 2 + b"nonsense\r\n\r\n")
            connection.socket.shutdown(socket.SHUT_WR)
            assert [final(connection)[0] for _ in range(3)] == [200, 200, 400]
            assert connection.answer() is None

    def test_waits_for_a_product(self, live, npy, form):
        live.executor.hold = True
        content, headers = form([("a", npy(np.eye(4))), ("b", npy(np.eye(4)))])
        for extra in ({}, {"Accept-Encoding": "identity"}):
            with contextlib.closing(Raw(live)) as connection:
                connection.send(content, headers | extra)
                connection.socket.shutdown(socket.SHUT_WR)
                until(lambda: live.executor.sent)
                live.executor.release()
                assert final(connection)[0] == 200
                assert connection.answer() is None

    def test_who_has_hung_up_is_found_out(self, live, npy, form):
        """By a word of the server's: until then it looks the same."""
        live.executor.hold = True
        content, headers = form([("a", npy(np.eye(4))), ("b", npy(np.eye(4)))])
        with contextlib.closing(Raw(live)) as connection:
            connection.send(content, headers)
            until(lambda: live.executor.sent)
        assert eventually(lambda: live.connections == 0)
        live.executor.release()
        value = live.app.state.metrics.registry.get_sample_value
        labels = {"op": "gemm", "algorithm": "none", "state": "cancelled"}
        assert eventually(lambda: value("gemmserve_jobs_total", labels) == 1)

    def test_in_the_middle_of_a_body_it_has_hung_up(self, live):
        with live.connect() as connection:
            connection.sendall(upload_head(8000) + bytes(80))
            until(lambda: live.core.store.used_bytes == 8000)
            connection.shutdown(socket.SHUT_WR)
            assert closed(connection)
        until(lambda: live.core.store.used_bytes == 0)


def final(connection):
    """The next answer that is no interim one."""
    while (answer := connection.answer()) is not None and answer[0] == 100:
        pass
    return answer
