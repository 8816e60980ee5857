"""Bytes to and from the front over several connections, some of which fail."""

from __future__ import annotations

import asyncio
import secrets

import pytest

from gemmserve_service.executor.agent.exchanges import (
    PIECE,
    Address,
    ExchangeError,
    Exchanges,
    RangeRefused,
    StaleAttempt,
)


class Peer:
    """A port that answers each exchange with what `answer(method, target, body)` returns; b"" ends the connection, None
    leaves it open without an answer."""

    def __init__(self, answer):
        self.answer = answer
        self.asked = []
        self.connections = 0

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_):
        self.server.close()

    @property
    def address(self):
        return Address("127.0.0.1", self.server.sockets[0].getsockname()[1])

    async def _serve(self, reader, writer):
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, target, _ = head.split(" ", 2)
                length = head.partition("Content-Length: ")[2].partition("\r")[0]
                body = await reader.readexactly(int(length or 0))
                self.asked.append((method, target))
                answer = self.answer(method, target, body)
                if answer is None:
                    continue
                if not answer:
                    break
                writer.write(answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def ok(body=b""):
    return b"HTTP/1.1 %d OK\r\nContent-Length: %d\r\n\r\n" % (200 if body else 204, len(body)) + body


def refused(status):
    return b"HTTP/1.1 %d No\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno" % status


@pytest.fixture
async def exchanges():
    made = []

    def make(peer, most=2, **fields):
        made.append(Exchanges(peer.address, "secret", most, peer.errors.append, **fields))
        return made[-1]

    yield make
    for each in made:
        each.close()


async def over(start):
    """The error that a transfer ends with."""
    ended = asyncio.get_running_loop().create_future()
    start(ended.set_result)
    return await asyncio.wait_for(ended, 60)


def peer_of(answer):
    peer = Peer(answer)
    peer.errors = []
    return peer


async def test_pieces_go_where_they_belong(exchanges):
    data = secrets.token_bytes(3 * PIECE + 17)
    ranges = [(at, min(at + PIECE, len(data))) for at in range(0, len(data), PIECE)]

    def answer(method, target, body):
        start, end = map(int, target[1:].split("-"))
        if method == "GET":
            return ok(data[start:end])
        taken[start:end] = body
        return ok()

    taken, target = bytearray(len(data)), bytearray(len(data))
    async with peer_of(answer) as peer:
        mine = exchanges(peer)
        pieces = [(f"/{start}-{end}", memoryview(target)[start:end]) for start, end in ranges]
        assert await over(lambda done: mine.fetch(pieces, done)) is None
        assert target == data
        assert await over(lambda done: mine.send(pieces, done)) is None
        assert taken == data
        assert peer.connections <= 2
        assert mine.moved >= 2 * len(data)
        assert peer.errors == []


async def test_a_connection_that_breaks_is_replaced(exchanges):
    async with peer_of(lambda *_: ok(b"1234") if len(peer.asked) > 1 else b"") as peer:
        target = bytearray(4)
        mine = exchanges(peer)
        assert await over(lambda done: mine.fetch([("/x", memoryview(target))], done)) is None
        assert (target, peer.connections, peer.errors) == (b"1234", 2, [])


async def test_three_broken_connections_are_the_end(exchanges, eventually):
    async with peer_of(lambda *_: b"") as peer:
        mine = exchanges(peer)
        transfer = mine.fetch([("/x", memoryview(bytearray(4)))], lambda _: pytest.fail("it has no end"))
        await eventually(lambda: peer.errors)
        assert isinstance(peer.errors[0], ExchangeError)
        assert transfer.over
        assert len(peer.asked) == 3


@pytest.mark.parametrize(
    ("status", "upload", "kind"), [(409, True, StaleAttempt), (410, False, RangeRefused)], ids=["stale", "gone"]
)
async def test_what_the_front_refuses_ends_the_transfer_alone(exchanges, status, upload, kind):
    async with peer_of(
        lambda method, target, body: refused(status) if target == "/x" else ok(b"" if upload else b"1234")
    ) as peer:
        mine = exchanges(peer)
        start = mine.send if upload else mine.fetch
        pieces = [("/x", memoryview(bytearray(4)))] * 3
        assert isinstance(await over(lambda done: start(pieces, done)), kind)
        assert await over(lambda done: start([("/y", memoryview(bytearray(4)))], done)) is None
        assert peer.errors == []


@pytest.mark.parametrize(
    "answer", [refused(401), refused(500), ok(b"123"), ok(b"12345"), b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"]
)
async def test_what_makes_no_sense_ends_the_link(exchanges, eventually, answer):
    async with peer_of(lambda *_: answer) as peer:
        exchanges(peer).fetch([("/x", memoryview(bytearray(4)))], lambda _: pytest.fail("it has no end"))
        await eventually(lambda: peer.errors)
        assert isinstance(peer.errors[0], ExchangeError)


async def test_an_exchange_that_stands_still_goes_over_another_connection(exchanges, eventually):
    async with peer_of(lambda *_: ok(b"1234") if len(peer.asked) > 1 else None) as peer:
        mine = exchanges(peer)
        target = bytearray(4)
        ended = asyncio.get_running_loop().create_future()
        mine.fetch([("/x", memoryview(target))], ended.set_result)
        await eventually(lambda: peer.asked)
        mine.look(3600.0)
        assert not ended.done()
        mine.look(-1.0)
        assert await asyncio.wait_for(ended, 60) is None
        assert target == b"1234"


async def test_nothing_is_sent_once_the_lease_is_over(exchanges, eventually):
    async with peer_of(lambda *_: ok()) as peer:
        mine = exchanges(peer, allowed=lambda: False)
        mine.send([("/x", memoryview(b"1234"))], lambda _: pytest.fail("it has no end"))
        await eventually(lambda: peer.errors)
        assert peer.asked == []
