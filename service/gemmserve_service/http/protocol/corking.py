"""Head and body of an answer in one write.

uvicorn writes an answer's head, then its body: two system calls, two segments, and a client that wakes up twice. Here a
head waits for what is written next in the same turn of the event loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

_INTERIM: Final = b"HTTP/1.1 1"
_JOINED: Final = 1 << 16
"""Bytes of a body that is copied behind its head; of a longer one the pieces are handed over as they are."""


class Corked:
    """A transport as one answer sees it; everything but writing and closing is the transport's own."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, end: Callable[[], None]) -> None:
        self._transport = transport
        self._loop = loop
        self._end = end
        self._head: bytes | None = None
        self._begun = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Holds the head back; writes the rest. What comes when the connection is gone goes nowhere: where requests are
        pipelined uvicorn tells the last one's answer alone that the client has hung up.
        """
        if self._transport.is_closing():
            self._head = None
            return
        if not self._begun:
            if data.startswith(_INTERIM):
                self._transport.write(data)
                return
            self._begun = True
            self._head = data
            self._loop.call_soon(self.flush)
            return
        head, self._head = self._head, None
        if head is None:
            self._transport.write(data)
        elif len(data) <= _JOINED:
            self._transport.write(head + data)
        else:
            self._transport.writelines((head, data))

    def flush(self) -> None:
        """Writes a head that nothing has followed."""
        head, self._head = self._head, None
        if head is not None and not self._transport.is_closing():
            self._transport.write(head)

    def close(self) -> None:
        """Closes after what was written, as `end` does it."""
        self.flush()
        self._end()
