"""Connection to the join port: its first bytes say whether it is a link, or carries data.

All that comes is read to one piece of memory, which every connection of the process has in turn: what is in it is dealt
with before the event loop goes on.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, cast

from gemmserve_service.executor.join_protocol import GREETING
from gemmserve_service.executor.joined.exchange import Exchange
from gemmserve_service.executor.joined.link import Link

if TYPE_CHECKING:
    from gemmserve_service.executor.joined.executor import JoinedExecutor

_MEMORY: Final = memoryview(bytearray((1 << 18) + (1 << 12)))
"""Room for a quarter of the largest result that comes by a link, and the heads beside it: four pieces are not five."""
GREETING_S: Final = 10.0
"""Seconds within which a connection must have said what it is, and a request's head must have come."""
IDLE_S: Final = 60.0
"""Seconds for which a data connection may be idle, or stand still."""
_LEAVE_S: Final = 2.0  # in which a peer may read why it was refused


class Connection(asyncio.BufferedProtocol):
    """One connection. `due` is when it is closed unless it gets on (time.monotonic)."""

    def __init__(self, executor: JoinedExecutor) -> None:
        self._executor = executor
        self._transport: asyncio.Transport | None = None
        self._first = bytearray()
        self._inner: Link | Exchange | None = None
        self._leaving = False
        self.due = time.monotonic() + GREETING_S

    @property
    def known(self) -> bool:
        """Whether it is a link that has joined, or belongs to one."""
        inner = self._inner
        return inner is not None and (inner.worker is not None if isinstance(inner, Link) else inner.known)

    @property
    def overdue_at(self) -> float | None:
        """When it is to be closed (time.monotonic); None: the watch over its worker decides."""
        return None if isinstance(self._inner, Link) and self._inner.worker is not None else self.due

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast("asyncio.Transport", transport)
        if not self._executor.entered(self):
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio."""
        del sizehint
        return _MEMORY

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio."""
        self._feed(_MEMORY[:nbytes])

    def _feed(self, data: memoryview) -> None:
        if self._leaving:
            return
        if self._inner is None:
            self._first += data
            if GREETING.startswith(self._first) and len(self._first) < len(GREETING):
                return
            data = memoryview(bytes(self._first))
            self._first.clear()
            data = self._begin(data)
        inner = self._inner
        if isinstance(inner, Exchange):
            was_idle = inner.idle
            inner.feed(data)
            self._moved(inner, was_idle=was_idle)
        elif inner is not None and len(data):
            inner.feed(data)

    def _begin(self, data: memoryview) -> memoryview:
        assert self._transport is not None
        if data[: len(GREETING)].tobytes() == GREETING:
            peer = self._transport.get_extra_info("peername")
            address = str(peer[0]) if isinstance(peer, tuple) and peer else ""
            self._inner = Link(self._executor, self._transport, address)
            return data[len(GREETING) :]
        # Of TLS a buffer of `high` bytes is too long, of TCP one of more: 0 would stop a connection that has sent all.
        self._transport.set_write_buffer_limits(high=int(self._transport.get_extra_info("sslcontext") is not None))
        self._inner = Exchange(self._executor, self._transport, self._leave)
        return data

    def _moved(self, exchange: Exchange, *, was_idle: bool = True) -> None:
        """Set when it has to get on by: a head has its time from its first byte, a body from its last."""
        if self._leaving:
            return
        if exchange.in_head:
            if was_idle:
                self.due = time.monotonic() + GREETING_S
        else:
            self.due = time.monotonic() + IDLE_S

    def pause_writing(self) -> None:
        """See asyncio."""
        if self._inner is not None:
            self._inner.paused(True)

    def resume_writing(self) -> None:
        """See asyncio."""
        inner = self._inner
        if inner is not None:
            inner.paused(False)
        if isinstance(inner, Exchange):
            self._moved(inner)

    def eof_received(self) -> bool:
        """See asyncio."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        del exc
        self._executor.left(self)
        if isinstance(self._inner, Link):
            self._inner.lost()
        elif self._inner is not None:
            self._inner.ended()

    def _leave(self) -> None:
        """Close when the peer has had time to read what was written: it may be in the middle of a body."""
        self._leaving = True
        self.due = time.monotonic() + _LEAVE_S
        assert self._transport is not None
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def abort(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close, and throw nothing away."""
        if self._transport is not None:
            self._transport.close()
