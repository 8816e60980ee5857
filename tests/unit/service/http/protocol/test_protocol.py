"""Refusals of the connection itself: problems like any other, in their turn."""

from __future__ import annotations

import contextlib
import json
import re

import pytest
from raw_connection import Raw, answer_of, read_all, until

from gemmserve_service.http.protocol import protocol
from gemmserve_service.http.protocol.protocol import State
from gemmserve_service.tenancy.keyring import create_key

GET = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def test_the_table_of_states_is_that_of_the_docstring():
    """Each row has a state, its meaning, and where each event leads."""
    lines = State.__doc__.splitlines()
    columns = [found.span() for found in re.finditer("=+", next(line for line in lines if "===" in line))]
    rows = {}
    for line in lines:
        name, _, *cells = (line[start:end].strip() for start, end in columns)
        if name in State.__members__:
            rows[name] = cells
    assert [*rows] == [*State.__members__]
    for column, tables in enumerate(
        [
            [protocol._HEAD_BEGINS],
            [protocol._HEAD_ENDS],
            [protocol._REQUEST_ENDS, protocol._LAST_ENDS],
            [protocol._SMALL_BEGINS],
        ]
    ):
        for name, cells in rows.items():
            found = {table[State[name]].name for table in tables if State[name] in table}
            assert found == set(filter(None, cells[column].split(", "))), (name, column)
    assert all(cells[4] == "ENDED" for cells in rows.values())


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
