"""The connection's class on a transport of the test's own: what is queued, and to whom answers belong."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import structlog

from gemmserve_service.http.protocol import protocol as module
from gemmserve_service.http.protocol.connections import Connections
from gemmserve_service.http.protocol.protocol import protocol_class
from gemmserve_service.settings import Settings

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Transport:
    def __init__(self):
        self.out, self.closed, self.paused, self.ended, self.tls = b"", False, False, False, False

    def get_extra_info(self, name, default=None):
        return {"peername": ("192.0.2.1", 5), "sockname": ("192.0.2.2", 80)}.get(name, default)

    def is_closing(self):
        return self.closed

    def write(self, data):
        self.out += bytes(data)

    def writelines(self, pieces):
        self.out += b"".join(pieces)

    def pause_reading(self):
        self.paused = True

    def resume_reading(self):
        self.paused = False

    def close(self):
        self.closed = True

    abort = close

    def can_write_eof(self):
        return not self.tls

    def write_eof(self):
        self.ended = True


async def not_found(scope, receive, send):
    await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


@pytest.fixture
def connect():
    """connect(app) -> the protocol of a new connection, and its transport."""
    made = []

    def make(app=not_found, **fields):
        registry = Connections(Settings(**fields)) if not made or fields else made[0].registry
        config = SimpleNamespace(loaded=True, asgi_version="3.0", root_path="", loaded_app=app)
        state = SimpleNamespace(connections=set(), tasks=set(), total_requests=0, default_headers=[])
        protocol, transport = protocol_class(registry)(config, state, {}), Transport()
        protocol.connection_made(transport)
        made.append(protocol)
        return protocol, transport

    yield make
    for protocol in made:
        for task in protocol.server_state.tasks:
            task.cancel()
        protocol.connection_lost(None)


async def turns(count=6):
    for _ in range(count):
        await asyncio.sleep(0)


async def test_no_more_is_read_than_one_piece_ahead(connect):
    protocol, transport = connect()
    longest = 0
    for _ in range(30):
        if not transport.paused:
            protocol.data_received(400 * GET)
        await turns(3)
        longest = max(longest, len(protocol._cycles))
    assert longest <= 400
    while protocol._cycles:
        await turns()
    assert not transport.paused


async def test_one_answer_to_a_request_whose_body_goes_wrong_behind_it(connect):
    protocol, transport = connect()
    protocol.data_received(b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
    await turns()
    protocol.data_received(b"ZZ\r\n")
    await turns()
    assert transport.out.count(b"HTTP/1.1 ") == 1
    assert transport.ended or transport.closed


@pytest.mark.parametrize(("version", "told"), [(b"1.0", 0), (b"1.1", 1)])
async def test_who_may_be_told_to_continue(connect, version, told):
    async def reads(scope, receive, send):
        await receive()

    protocol, transport = connect(reads)
    fields = b"Host: x\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"
    protocol.data_received(b"POST /x HTTP/" + version + b"\r\n" + fields)
    await turns()
    assert transport.out.count(b"100 Continue") == told


async def test_a_pipelined_request_has_nothing_of_the_log_context_before_it(connect):
    seen = []

    async def app(scope, receive, send):
        seen.append(structlog.contextvars.get_contextvars().get("trace_id"))
        structlog.contextvars.bind_contextvars(trace_id=f"trace {len(seen)}")
        await not_found(scope, receive, send)

    protocol, _ = connect(app)
    protocol.data_received(3 * GET)
    await turns(12)
    assert seen == [None, None, None]


async def test_a_connection_that_was_dropped_makes_no_room_a_second_time(connect):
    first, _ = connect(max_connections_per_address=1, trusted_proxies="")
    second, transport = connect()
    assert second.counted
    assert not first.counted  # it was idle, and gave its place
    first.data_received(GET[:10])
    assert first.registry.idle == 1
    second.data_received(GET[:10])
    second.data_received(GET[10:])
    await turns()
    assert transport.out.count(b"404") == 1


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
async def test_who_sends_a_body_that_nobody_reads_has_time_to_read_the_answer(connect, monkeypatch, eventually, tls):
    monkeypatch.setattr(module, "_LINGER_S", 0.2)
    protocol, transport = connect()
    transport.tls = tls
    protocol.data_received(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\nConnection: close\r\n\r\n")
    await eventually(lambda: transport.out.endswith(b"no"))
    assert transport.out.startswith(b"HTTP/1.1 404")
    for _ in range(32):  # what is unread when it closes would take the answer along
        assert not transport.closed
        if not transport.paused:
            protocol.data_received(bytes(1 << 16))
    assert transport.paused  # a megabyte is enough: who looks has the answer, who does not waits, and is cut off
    assert not transport.closed
    assert transport.ended != tls
    await eventually(lambda: transport.closed)
