"""Answers as they are framed, and what becomes of apps that break ASGI's rules."""

from __future__ import annotations

import asyncio
import gc
import weakref
from types import SimpleNamespace

import pytest

from gemmserve_service.http.protocol.asgi_cycle import AsgiCycle
from gemmserve_service.http.protocol.request_heads import RequestHead
from gemmserve_service.http.protocol.response_writer import FlowControl


class Wire:
    """A transport that notes what it is given."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = self.aborted = False

    def write(self, data) -> None:
        self.written += data

    def writelines(self, pieces) -> None:
        self.written += b"".join(pieces)

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        """Nothing comes by itself."""

    resume_reading = pause_reading


def cycle_of(method="GET", version="1.1", target=b"/a%20b?c=%20", headers=()):
    wire = Wire()
    connection = SimpleNamespace(
        transport=wire,
        flow=FlowControl(wire),
        loop=asyncio.get_running_loop(),
        config=SimpleNamespace(asgi_version="3.0", root_path=""),
        server_state=SimpleNamespace(default_headers=[(b"date", b"now")]),
        app_state={"a": 1},
        client=("127.0.0.1", 1),
        server=("127.0.0.1", 2),
        scheme="http",
        finished=[],
    )
    connection.read_on = connection.flow.resume_reading
    connection.answered = connection.finished.append
    cycle = AsgiCycle(connection, RequestHead(method, target, version, list(headers), version != "1.0"))
    cycle.wire, cycle.finished = wire, connection.finished
    return cycle


async def answer(cycle, *bodies, status=200, headers=()):
    await cycle.send({"type": "http.response.start", "status": status, "headers": list(headers)})
    for number, body in enumerate(bodies, start=1):
        await cycle.send({"type": "http.response.body", "body": body, "more_body": number < len(bodies)})


async def test_what_was_answered_is_not_left_to_the_garbage_collector():
    async def app(scope, receive, send):
        for each in scope["extensions"].values():
            each.on_bytes = lambda _, scope=scope: None  # as the middleware's, which holds the scope
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    gc.collect()
    gc.disable()
    try:
        cycle = cycle_of()
        await cycle.run(app)
        gone = weakref.ref(cycle)
        cycle.finished.clear()
        del cycle
        await asyncio.sleep(0)  # the writer's flush of the head
        assert gone() is None
    finally:
        gc.enable()


async def test_the_scope():
    scope = cycle_of().scope
    assert (scope["path"], scope["raw_path"], scope["query_string"]) == ("/a b", b"/a%20b", b"c=%20")
    assert scope["state"] == {"a": 1}


@pytest.mark.parametrize(
    ("method", "version", "status", "headers", "sent"),
    [
        ("GET", "1.1", 200, [(b"Content-Length", b"3")], b"content-length: 3\r\n\r\nabc"),
        ("GET", "1.1", 200, [], b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"),
        ("GET", "1.0", 200, [], b"connection: close\r\n\r\nabc"),
        ("HEAD", "1.1", 200, [], b"\r\n\r\n"),
        ("HEAD", "1.1", 200, [(b"content-length", b"3")], b"content-length: 3\r\n\r\n"),
    ],
)
async def test_framing(method, version, status, headers, sent):
    cycle = cycle_of(method, version)
    await answer(cycle, b"ab", b"c", status=status, headers=headers)
    assert cycle.wire.written.startswith(b"HTTP/1.1 200 OK\r\ndate: now\r\n")
    assert cycle.wire.written.endswith(b"now\r\n" + sent if sent[0] != 13 else b"now" + sent)
    assert cycle.finished == [cycle]
    assert cycle.keep_alive == (version == "1.1")


@pytest.mark.parametrize("started", [False, True])
async def test_a_request_that_ends_with_the_server_is_not_answered(caplog, started):
    """500 would be the request's fault: clients repeat what broke off."""
    cycle = cycle_of("POST")

    async def app(scope, receive, send):
        if started:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()

    task = asyncio.ensure_future(cycle.run(app))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert cycle.wire.aborted
    assert b" 500 " not in cycle.wire.written
    assert not caplog.records


async def test_a_cancellation_that_an_app_lets_out_is_its_error(caplog):
    cycle = cycle_of("POST")

    async def app(scope, receive, send):
        raise asyncio.CancelledError

    await cycle.run(app)
    assert cycle.wire.written.startswith(b"HTTP/1.1 500 ")
    assert "Exception in ASGI application" in caplog.text


@pytest.mark.parametrize("status", [204, 304])
async def test_answers_without_a_body(status):
    cycle = cycle_of()
    await answer(cycle, b"", status=status)
    assert b"transfer-encoding" not in cycle.wire.written
    assert cycle.wire.written.endswith(b"\r\n\r\n")


async def test_an_answer_may_close_the_connection():
    cycle = cycle_of()
    await answer(cycle, b"", headers=[(b"connection", b"Close"), (b"content-length", b"0")])
    assert not cycle.keep_alive
    assert cycle.wire.written.lower().count(b"connection: close") == 1


@pytest.mark.parametrize(
    "steps",
    [
        lambda cycle: answer(cycle, b"abcd", headers=[(b"content-length", b"3")]),
        lambda cycle: answer(cycle, b"ab", headers=[(b"content-length", b"3")]),
        lambda cycle: answer(cycle, headers=[(b"x", b"a\r\nb: c")]),
        lambda cycle: answer(cycle, headers=[(b"x\r\n", b"a")]),
        lambda cycle: cycle.send({"type": "http.response.body"}),
        lambda cycle: answer(cycle, b"a", headers=[(b"content-length", b"1")]),
    ],
)
async def test_what_cannot_be_framed(steps):
    cycle = cycle_of()

    async def too_much():
        await steps(cycle)
        await cycle.send({"type": "http.response.body"})

    with pytest.raises(RuntimeError):
        await too_much()
    assert b"a\r\nb: c" not in cycle.wire.written


async def test_an_app_that_fails_is_answered_500():
    async def app(scope, receive, send):
        raise ZeroDivisionError

    cycle = cycle_of()
    await cycle.run(app)
    assert cycle.wire.written.startswith(b"HTTP/1.1 500 ")
    assert not cycle.keep_alive
    assert cycle.complete


@pytest.mark.parametrize(
    "headers",
    [
        [(b"x", b"a\r\nb: c")],
        [(b"content-length", b"3"), (b"x\r\n", b"a")],
        [(b"transfer-encoding", b"chunked"), (b"x", b"\0")],
        [(b"content-length", b"three")],
    ],
)
async def test_an_answer_whose_head_cannot_be_sent_is_500_instead(headers):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    cycle = cycle_of()
    await cycle.run(app)
    assert cycle.wire.written.startswith(b"HTTP/1.1 500 ")
    assert cycle.wire.written.count(b"HTTP/1.1") == 1
    assert cycle.wire.written.endswith(b"\r\n\r\nInternal Server Error")
    assert cycle.finished == [cycle]
    assert not cycle.keep_alive


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_an_app_that_fails_within_an_answer_has_it_cut_off(version):
    """So that it does not look whole: the connection's end is the end of one without a length in HTTP/1.0."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})

    cycle = cycle_of(version=version)
    await cycle.run(app)
    assert cycle.wire.aborted
    assert not cycle.complete


async def test_a_body_is_received_in_pieces():
    cycle = cycle_of(headers=[(b"expect", b"100-Continue")])
    cycle.feed(b"ab")
    assert await cycle.receive() == {"type": "http.request", "body": b"ab", "more_body": True}
    assert cycle.wire.written == b"HTTP/1.1 100 Continue\r\n\r\n"
    waiting = asyncio.ensure_future(cycle.receive())
    await asyncio.sleep(0)
    assert not waiting.done()
    cycle.feed(b"c")
    cycle.feed_end()
    assert await waiting == {"type": "http.request", "body": b"c", "more_body": False}
    cycle.disconnect()
    assert await cycle.receive() == {"type": "http.disconnect"}
    await answer(cycle, b"nobody reads this")
    assert cycle.wire.written.count(b"HTTP/1.1") == 1
