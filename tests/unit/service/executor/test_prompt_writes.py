"""Writes that begin at once, on sockets of the system, and on transports of both event loops."""

from __future__ import annotations

import asyncio
import socket

import pytest

from gemmserve_service.executor.prompt_writes import PromptWriter

PIECES = [b"head", memoryview(bytearray(range(256)) * 16), b"", b"tail"]
WHOLE = b"".join(map(bytes, PIECES))


class Reader(asyncio.Protocol):
    pass


@pytest.fixture
async def ends():
    """A transport, and the socket at its other end."""
    near, far = socket.socketpair()
    far.setblocking(False)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    transport, _ = await asyncio.get_running_loop().create_connection(Reader, sock=near)
    yield transport, far
    transport.abort()
    far.close()


async def test_it_is_there_before_the_turn_of_the_event_loop_ends(ends):
    transport, far = ends
    PromptWriter(transport).write(*PIECES)
    assert far.recv(1 << 16) == WHOLE


async def test_what_is_not_taken_at_once_follows_in_its_order_and_memory_is_the_callers_again(ends):
    transport, far = ends
    writer, large = PromptWriter(transport), bytearray(b"x" * (1 << 20))
    writer.write(b"first", memoryview(large), b"last")
    large[:] = bytes(len(large))
    writer.write(*PIECES)
    expected = b"first" + b"x" * (1 << 20) + b"last" + WHOLE
    got = bytearray()
    while len(got) < len(expected):
        got += await asyncio.wait_for(asyncio.get_running_loop().sock_recv(far, 1 << 20), 60)
    assert bytes(got) == expected


async def test_more_pieces_than_the_system_takes(ends):
    transport, far = ends
    PromptWriter(transport).write(*[b"ab"] * 3000)
    got = bytearray()
    while len(got) < 6000:
        got += await asyncio.wait_for(asyncio.get_running_loop().sock_recv(far, 1 << 16), 60)
    assert got == b"ab" * 3000


async def test_nothing_is_written_to_what_closes_and_a_broken_end_is_the_transports_to_find(ends):
    transport, far = ends
    writer = PromptWriter(transport)
    far.close()
    writer.write(*PIECES)
    for _ in range(100):
        if transport.is_closing():
            break
        await asyncio.sleep(0.01)
    assert transport.is_closing()
    writer.write(*PIECES)


class Coded:
    """Transport over TLS: the socket under it is not for bytes as they are."""

    def __init__(self, connection):
        self.connection, self.written = connection, b""

    def get_extra_info(self, name):
        return {"socket": self.connection, "sslcontext": object()}[name]

    def is_closing(self):
        return False

    def write(self, data):
        self.written += data


def test_bytes_are_not_written_past_tls():
    near, far = socket.socketpair()
    with near, far:
        transport = Coded(near)
        PromptWriter(transport).write(*PIECES)
        assert transport.written == WHOLE
        far.setblocking(False)
        with pytest.raises(BlockingIOError):
            far.recv(1)
