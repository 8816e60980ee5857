"""Clients that have ended their side of a connection: they wait for an answer, or have hung up."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

_FIRST_LOOK_S: Final = 0.01  # after which a client that has hung up will have said so, on this machine ...
_LAST_LOOK_S: Final = 1.0  # ... and anywhere
_PATIENCE_S: Final = 5.0  # with a client of HTTP/1.0, to whom nothing can be said but the answer


class HalfClose:
    """Aborts the connection of a client that has hung up. The kernel tells only when something is sent, so 100
    (Continue) is, which every client of HTTP/1.1 skips; one of HTTP/1.0 is waited for `_PATIENCE_S`.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, answering: Callable[[], bool]
    ) -> None:
        """`answering()`: whether an answer has begun that is not complete; into it nothing may be written, and to whom
        an answer is sent shows whether it is there.
        """
        self._transport = transport
        self._loop = loop
        self._answering = answering

    def watch(self, version: str, *, may_write: bool) -> None:
        """Begins. `version`: HTTP's, of the client; `may_write`: no further answer may be due before the next look."""
        if version == "1.0":
            self._loop.call_later(_PATIENCE_S, self._lose_patience)
            return
        if may_write and not self._answering():
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._loop.call_later(_FIRST_LOOK_S, self._look, _FIRST_LOOK_S)

    def _look(self, after_s: float) -> None:
        if self._transport.is_closing():
            return
        connection = self._transport.get_extra_info("socket")
        if connection is not None and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._transport.abort()
        else:
            after_s = min(2 * after_s, _LAST_LOOK_S)
            self._loop.call_later(after_s, self._look, after_s)

    def _lose_patience(self) -> None:
        if not self._answering() and not self._transport.is_closing():
            self._transport.abort()
