"""Head and body in one write."""

from __future__ import annotations

import asyncio

import pytest

from gemmserve_service.http.protocol.response_writer import ResponseWriter


class Wire:
    """A transport that notes what it is given."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written.append(data)

    def writelines(self, pieces) -> None:
        self.written.append(b"".join(pieces))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


@pytest.fixture
async def wire():
    return Wire()


@pytest.fixture
async def writer(wire):
    return ResponseWriter(wire, asyncio.get_running_loop())


@pytest.mark.parametrize("size", [0, 10, 1 << 20])
async def test_a_head_goes_with_what_follows_it(wire, writer, size):
    writer.head(b"HTTP/1.1 200 OK\r\n\r\n")
    assert wire.written == []
    writer.body(b"x" * size)
    writer.body(b"y")
    assert wire.written == [b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * size, b"y"]
    await asyncio.sleep(0)
    assert len(wire.written) == 2


async def test_a_head_alone_waits_for_the_turn_of_the_loop(wire, writer):
    writer.head(b"HTTP/1.1 200 OK\r\n\r\n")
    await asyncio.sleep(0)
    assert wire.written == [b"HTTP/1.1 200 OK\r\n\r\n"]
    writer.body(b"later")
    assert wire.written[1:] == [b"later"]


async def test_interim_answers_and_the_end_are_not_held_back(wire, writer):
    writer.interim(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert wire.written == [b"HTTP/1.1 100 Continue\r\n\r\n"]
    writer.head(b"HTTP/1.1 204 No Content\r\n\r\n")
    writer.flush()
    assert wire.written[1:] == [b"HTTP/1.1 204 No Content\r\n\r\n"]


async def test_what_comes_when_the_connection_is_gone_goes_nowhere(wire, writer):
    """Whatever of an answer has been written: a transport that is closed must not be written to."""
    writer.head(b"HTTP/1.1 200 OK\r\n\r\n")
    wire.closed = True
    await asyncio.sleep(0)
    for _ in range(2):
        writer.body(b"x" * (1 << 17))
    assert wire.written == []
