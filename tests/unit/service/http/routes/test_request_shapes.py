"""The table of `request_shapes` against the server as it listens: each is one request with its body, or refused."""

from __future__ import annotations

import contextlib
import json

import pytest
from raw_connection import Raw, eventually, until
from request_shapes import HIDDEN_PATH, SHAPES

PROBE = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Request-Id: behind\r\n\r\n"


@pytest.fixture(scope="module")
def counting(serve_all):
    """The app live, and how often a route was asked for."""
    live = serve_all(head_timeout_s=60)
    counted = []
    count = live.app.state.metrics.request_done

    def spy(route, method, status, **fields):
        counted.append((route, status))
        count(route, method, status, **fields)

    live.app.state.metrics.request_done = spy
    live.counted = counted
    return live


@pytest.fixture
def served(counting):
    """The same, and nobody has asked yet."""
    counting.counted.clear()
    return counting


def connected(live):
    return contextlib.closing(Raw(live))


def send(live, connection, data, piece):
    """Cut into pieces of that size, each in a segment of its own; whoever was refused may have hung up."""
    with contextlib.suppress(ConnectionError):
        for start in range(0, len(data), piece):
            connection.socket.sendall(data[start : start + piece])
            if piece < len(data):
                live.call(lambda: None)


def check(shape, answer):
    status, headers, body = answer
    assert status in shape.statuses, body
    assert headers["x-request-id"] not in {"hidden", "behind"}
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["content-security-policy"]
    if shape.slug:
        assert headers["content-type"] == "application/problem+json"
        document = json.loads(body)
        assert document["type"] == f"/problems/{shape.slug}", document
        assert document["status"] == status
        assert document["detail"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_alone(served, shape):
    """At once, and in pieces."""
    for piece in (1 << 20, 7):
        served.counted.clear()
        exchange(served, shape, piece)


def exchange(served, shape, piece):
    with connected(served) as connection:
        send(served, connection, shape.data, piece)
        answer = connection.answer(body=not shape.data.startswith(b"HEAD"))
        assert answer is not None, "no answer"
        check(shape, answer)
        if shape.outcome == "taken" and not shape.closes:
            connection.socket.sendall(PROBE)
            status, headers, _ = connection.answer()
            assert (status, headers["x-request-id"]) == (200, "behind")
        else:
            assert answer[1]["connection"] == "close"
            assert connection.answer() is None
    expected = 2 if shape.outcome == "taken" and not shape.closes else 1
    assert eventually(lambda: len(served.counted) >= expected)
    assert len(served.counted) == expected
    assert HIDDEN_PATH not in [route for route, _ in served.counted]


def test_the_table_sees_a_hidden_request(served):
    """One that is not hidden."""
    with connected(served) as connection:
        connection.socket.sendall(SHAPES[0].data.replace(b"Content-Length", b"X-Length"))
        assert connection.answer()[0] == 400
        assert connection.answer()[1]["x-request-id"] == "hidden"
    until(lambda: HIDDEN_PATH in [route for route, _ in served.counted])
