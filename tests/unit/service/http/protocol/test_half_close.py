"""Clients that have ended their side of the connection: answered, or found to have hung up."""

from __future__ import annotations

import contextlib
import json
import socket

import numpy as np
import pytest
from raw_connection import Raw, closed, eventually, read_all, until, upload_head

from gemmserve_service.http.protocol import half_close

GET = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


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
        content = npy(np.zeros(1 << 20))  # twice what Linux lets a sending socket hold
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

    @pytest.mark.parametrize("app", [False, True])
    @pytest.mark.parametrize("cut", [60, -20])
    def test_half_a_request_behind_it_costs_nobody_an_answer(self, live, npy, form, app, cut):
        """Within the second one's head, or its body. `app`: whether the app has the first, and looks for its end."""
        live.executor.hold = True
        content, headers = form([("a", npy(np.eye(4))), ("b", npy(np.eye(4)))])
        if app:
            headers = headers | {"Want-Content-Digest": "sha-256=1"}
        with contextlib.closing(Raw(live)) as connection:
            whole = connection.head(content, headers) + content
            connection.socket.sendall(whole + whole[:cut])
            connection.socket.shutdown(socket.SHUT_WR)
            until(lambda: live.executor.sent)
            assert live.connections == 1
            live.executor.release()
            assert final(connection)[0] == 200
            assert final(connection) is None

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
