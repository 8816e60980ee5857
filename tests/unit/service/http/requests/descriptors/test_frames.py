"""What comes over the socket for shared memory: nonsense, and what the loop has not looked at yet."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from types import SimpleNamespace

import pytest
from memory_peer import MEMORY, NEEDS_MEMFD, A, memory, open_memory

from gemmserve_service.http.requests.descriptors import Descriptors

OPEN = SimpleNamespace(current=SimpleNamespace(closed=False))
"""A keyring without keys."""

pytestmark = NEEDS_MEMFD


@pytest.mark.parametrize(
    "frame",
    [
        b"{", b"[]", b"\x80\x04N.", b"null", {"kind": "other"}, MEMORY | {"number": -1}, MEMORY | {"number": 1.5},
        MEMORY | {"number": 1 << 60}, MEMORY | {"offset": -1}, MEMORY | {"more": 1}, {"kind": "memory"},
        {"kind": "hello", "version": 1}, b"x" * (17 << 10),
    ],
)  # fmt: skip
def test_what_is_no_frame_ends_the_session(app, peer, frame):
    fd = memory(A)
    peer.send(frame, fd)
    os.close(fd)
    assert peer.ended()
    app.until(lambda: app.descriptors.sessions == 0)
    assert peer.http.get("/livez").status_code == 200


@pytest.mark.parametrize("count", [0, 2, 6])
def test_a_frame_has_one_descriptor(app, peer, count):
    before = open_memory()
    fds = [memory(A) for _ in range(count)]
    peer.send(MEMORY, *fds)
    for fd in fds:
        os.close(fd)
    assert peer.ended()
    app.until(lambda: open_memory() <= before)


def test_a_number_that_is_taken_ends_the_session(app, peer):
    for _ in range(2):
        fd = memory(A)
        peer.send(MEMORY, fd)
        os.close(fd)
    assert peer.ended()


@pytest.mark.parametrize("hello", [{"kind": "hello", "version": 2}, MEMORY, b"GET / HTTP/1.1\r\n\r\n"])
def test_whoever_does_not_say_hello_is_not_heard(app, hello):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(60)
        connection.connect(f"{app.path}.fds")
        connection.send(hello if isinstance(hello, bytes) else json.dumps(hello).encode())
        assert connection.recv(100) == b""


@pytest.fixture
async def registry(sockets):
    """A registry without an app, in this test's loop, and its listener."""
    registry = Descriptors(SimpleNamespace(max_shared_descriptors=8, head_timeout_s=30), OPEN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(sockets))
        listener.listen()
        registry.start(listener)
        yield registry, listener
        registry.stop()


async def turn(condition):
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (what the registry does has no event)
            await asyncio.sleep(0.001)


async def test_what_was_sent_before_the_request_is_found_though_the_loop_has_not_looked(registry, sockets):
    registry, _ = registry
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(sockets))
        connection.send(b'{"kind": "hello", "version": 1}')
        await turn(lambda: registry.sessions)
        session = registry.session(json.loads(connection.recv(1000))["session"], "")
        fd = memory(A)
        socket.send_fds(connection, [json.dumps(MEMORY).encode()], [fd])
        os.close(fd)
        session.take(1).close()  # with no await between
