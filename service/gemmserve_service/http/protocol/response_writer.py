"""Writing of answers, head and body in one system call, and flow control both ways."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_JOINED: Final = 1 << 16
"""Bytes of a body that is copied behind its head; of a longer one the pieces are handed over as they are."""

_PHRASES: Final = {status.value: status.phrase for status in HTTPStatus}
STATUS_LINES: Final = {
    status: f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode("ascii") for status in range(100, 600)
}
"""Status lines by status code."""


def field_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Header fields as they are sent."""
    return b"".join([b"%b: %b\r\n" % field for field in headers])


class FlowControl:
    """Reading paused and resumed by the server, writing by the transport."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.read_paused = False
        self.write_paused = False
        self._writable = asyncio.Event()
        self._writable.set()

    def pause_reading(self) -> None:
        """Leaves what comes in the socket; idempotent."""
        if not self.read_paused:
            self.read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Reads on; idempotent."""
        if self.read_paused:
            self.read_paused = False
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        """The transport's buffer is full."""
        self.write_paused = True
        self._writable.clear()

    def resume_writing(self) -> None:
        """The transport's buffer has room, or the connection is lost."""
        self.write_paused = False
        self._writable.set()

    async def drain(self) -> None:
        """Waits until the transport's buffer has room."""
        await self._writable.wait()


class ResponseWriter:
    """One answer's bytes. Its head waits for what is written next in the same turn of the event loop, so that both go
    in one system call and one segment, and the client wakes up once. Nothing is written to a transport that is closed.
    """

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head: bytes | None = None

    def interim(self, data: bytes) -> None:
        """Writes a whole 1xx answer at once."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def head(self, data: bytes) -> None:
        """Takes the head, which goes out with the next piece of the body, or with this turn of the loop."""
        self._head = data
        self._loop.call_soon(self.flush)

    def body(self, *pieces: bytes | memoryview) -> None:
        """Writes the body's next bytes."""
        head, self._head = self._head, None
        if self._transport.is_closing():
            return
        if head is not None:
            pieces = (head, *pieces)
        if len(pieces) == 1:
            self._transport.write(pieces[0])
        elif sum(map(len, pieces)) <= _JOINED:
            self._transport.write(b"".join(pieces))
        else:
            self._transport.writelines(pieces)

    def flush(self) -> None:
        """Writes a head that nothing has followed."""
        if self._head is not None:
            self.body()
