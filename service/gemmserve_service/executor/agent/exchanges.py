"""Data exchanges with the front: bytes of operands straight into their place, bytes of results straight from theirs.

Transfers are cut into pieces, which go over several connections at once; of those that wait the most urgent one goes
next. A connection that breaks is replaced, and its piece sent or asked for again: that changes nothing at the front.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Coroutine

log = logging.getLogger(__name__)

PIECE: Final = 8 << 20
"""Bytes of one exchange at most."""
_TURN: Final = 1 << 20
"""Bytes that are taken from a connection, or given to it, in one turn of the event loop."""
_HEAD: Final = 1 << 12
_TRIES: Final = 3
"""Connections that a piece may lose before the link is given up."""


class ExchangeError(Exception):
    """The front cannot be reached for bytes, or answers something that it should not."""


class RangeRefused(Exception):  # noqa: N818 (says what is the case)
    """The front does not give these bytes: no task that it knows this link to have reads them."""


class StaleAttempt(Exception):  # noqa: N818 (says what is the case)
    """The front does not want these bytes any more: the task is another worker's, or nobody's."""


@dataclass(frozen=True, slots=True)
class Address:
    """Address of the front's port; `server_name` is what its certificate must be for, with TLS."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None

    async def connect(self, protocol: Callable[[], asyncio.BaseProtocol]) -> asyncio.BaseProtocol:
        """Open a connection. Raises OSError."""
        loop = asyncio.get_running_loop()
        name = self.host if self.tls is not None else None
        _, made = await loop.create_connection(protocol, self.host, self.port, ssl=self.tls, server_hostname=name)
        return made

    @property
    def authority(self) -> str:
        """Host and port, as they stand in the Host header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Transfer:
    """Bytes on their way; `done(error)` is called once all are there, or when they will not be."""

    __slots__ = ("_done", "left", "over")

    def __init__(self, pieces: int, done: Callable[[Exception | None], None]) -> None:
        self._done = done
        self.left = pieces
        self.over = False

    def end(self, error: Exception | None) -> None:
        """Tell of the end, once."""
        if not self.over:
            self.over = True
            self._done(error)

    def refuse(self, error: Exception) -> None:
        """Tell that the front refuses it, after its end."""
        self._done(error)

    def cancel(self) -> None:
        """End it without a call of `done`: nobody wants it any more."""
        self.over = True


class _Piece:
    __slots__ = ("body", "order", "target", "transfer", "tries", "upload")

    def __init__(
        self, order: tuple[int, int], transfer: Transfer, target: str, body: memoryview, *, upload: bool
    ) -> None:
        self.order = order
        self.transfer = transfer
        self.target = target
        self.body = body
        self.upload = upload
        self.tries = 0

    def __lt__(self, other: _Piece) -> bool:
        return self.order < other.order


class Exchanges:
    """Transfers in one direction, over at most `most` connections; `failed(error)` hears of what ends the link."""

    def __init__(
        self,
        address: Address,
        secret: str,
        most: int,
        failed: Callable[[Exception], None],
        allowed: Callable[[], bool] = lambda: True,
    ) -> None:
        """`allowed`: asked before anything is sent: whether the lease lasts."""
        self._address = address
        self._heads = f"Host: {address.authority}\r\nAuthorization: Bearer {secret}\r\n"
        self._most = most
        self._failed = failed
        self._allowed = allowed
        self._waiting: list[_Piece] = []
        self._idle: list[_Connection] = []
        self._connections: set[_Connection] = set()
        self._opening = 0
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self.moved = 0
        """Bytes that were moved, both ways; grows."""

    def fetch(
        self, pieces: list[tuple[str, memoryview]], done: Callable[[Exception | None], None], *, urgency: int = 0
    ) -> Transfer:
        """Ask for bytes, each with the target of its exchange; those of lesser `urgency` go first."""
        return self._start(pieces, done, urgency, upload=False)

    def send(
        self, pieces: list[tuple[str, memoryview]], done: Callable[[Exception | None], None], *, urgency: int = 0
    ) -> Transfer:
        """Send bytes likewise."""
        return self._start(pieces, done, urgency, upload=True)

    def close(self) -> None:
        """End all connections; no transfer is told."""
        self._closed = True
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()
        for connection in list(self._connections):
            connection.abort()

    def drop(self, transfer: Transfer) -> None:
        """Cancel a transfer: nothing touches its memory any more when this returns."""
        transfer.cancel()
        for connection in list(self._connections):
            if connection.piece is not None and connection.piece.transfer is transfer:
                connection.abort()

    def _start(
        self,
        pieces: list[tuple[str, memoryview]],
        done: Callable[[Exception | None], None],
        urgency: int,
        *,
        upload: bool,
    ) -> Transfer:
        transfer = Transfer(len(pieces), done)
        for target, body in pieces:
            order = urgency, next(self._numbers)
            heapq.heappush(self._waiting, _Piece(order, transfer, target, body, upload=upload))
        self._go()
        return transfer

    def _go(self) -> None:
        while self._waiting and not self._closed:
            if self._waiting[0].transfer.over:
                heapq.heappop(self._waiting)
                continue
            if self._idle:
                self._idle.pop().begin(heapq.heappop(self._waiting))
                continue
            wanted = min(len(self._waiting), self._most - len(self._connections)) - self._opening
            for _ in range(wanted):
                self._opening += 1
                self._spawn(self._open())
            return

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self) -> None:
        try:
            made = await self._address.connect(lambda: _Connection(self))
        except OSError as error:
            self._opening -= 1
            if not self._closed and self._waiting and not self._connections and not self._opening:
                self._failed(ExchangeError(f"no connection for bytes: {error}"))
            return
        self._opening -= 1
        connection = cast("_Connection", made)
        if self._closed:
            connection.abort()
            return
        if connection.alive:
            self._connections.add(connection)
            self._idle.append(connection)
        self._go()

    # -- told by connections ----------------------------------------------------------------------------------------

    def request(self, piece: _Piece) -> bytes:
        """Return the head of a piece's exchange."""
        if piece.upload:
            line = f"PUT {piece.target} HTTP/1.1\r\n{self._heads}Content-Length: {len(piece.body)}\r\n\r\n"
        else:
            line = f"GET {piece.target} HTTP/1.1\r\n{self._heads}\r\n"
        return line.encode("ascii")

    def allowed(self) -> bool:
        """Whether anything may be sent."""
        return self._allowed()

    def finished(self, connection: _Connection, piece: _Piece, status: int) -> None:
        """Take note of an exchange that is over, and of its connection, which is free."""
        if connection.alive:
            self._idle.append(connection)
        expected = 204 if piece.upload else 200
        transfer = piece.transfer
        if status == expected:
            transfer.left -= 1
            if not transfer.left:
                transfer.end(None)
        elif status == (409 if piece.upload else 410):
            if not transfer.over:
                self.drop(transfer)
                transfer.refuse(StaleAttempt() if piece.upload else RangeRefused())
        else:
            transfer.cancel()
            self._failed(ExchangeError(f"the front answered {status} to {piece.target.partition('?')[0]}"))
        self._go()

    def lost(self, connection: _Connection, piece: _Piece | None) -> None:
        """Take note of the end of a connection, in the middle of an exchange perhaps."""
        self._connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if self._closed:
            return
        if piece is not None and not piece.transfer.over:
            piece.tries += 1
            if piece.tries >= _TRIES:
                piece.transfer.cancel()
                self._failed(ExchangeError(f"{_TRIES} connections broke over {piece.target.partition('?')[0]}"))
                return
            heapq.heappush(self._waiting, piece)
        self._go()


class _Connection(asyncio.BufferedProtocol):
    """One connection, with one exchange at a time. Bodies are received where they belong."""

    def __init__(self, owner: Exchanges) -> None:
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._head = bytearray(_HEAD)
        self._head_length = 0
        self._status = 0
        """Status of the answer whose body comes; 0: its head is not all there."""
        self._left = 0
        """Bytes of it that are still to come."""
        self._target: memoryview | None = None
        """Memory that they go to; None: nobody wants them."""
        self._sent = 0
        self._paused = False
        self._closes = False
        self.piece: _Piece | None = None
        self.alive = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_TURN)
        self.alive = True

    def begin(self, piece: _Piece) -> None:
        """Start an exchange."""
        assert self._transport is not None
        self.piece = piece
        self._status = self._left = self._head_length = self._sent = 0
        if not self._owner.allowed():
            self.abort()
            return
        self._transport.write(self._owner.request(piece))
        if piece.upload:
            self._push()

    def _push(self) -> None:
        """Give the connection what it takes of the body."""
        piece, transport = self.piece, self._transport
        while piece is not None and transport is not None and not self._paused and self._sent < len(piece.body):
            if not self._owner.allowed():
                self.abort()
                return
            part = piece.body[self._sent : self._sent + _TURN]
            self._sent += len(part)
            self._owner.moved += len(part)
            transport.write(part)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self.piece is not None and self.piece.upload:
            self._push()

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio.BufferedProtocol."""
        del sizehint
        if self._status and self._target is not None:
            done = len(self._target) - self._left
            return self._target[done : done + min(self._left, _TURN)]
        start = self._head_length if not self._status else 0
        return memoryview(self._head)[start:]

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio.BufferedProtocol."""
        if self._status:
            self._took(nbytes)
            return
        self._head_length += nbytes
        end = self._head.find(b"\r\n\r\n", 0, self._head_length)
        if end < 0:
            if self._head_length == _HEAD or self.piece is None:
                self.abort()
            return
        self._read_head(bytes(self._head[:end]))
        if not self.alive:
            return
        rest = self._head_length - end - 4
        if rest > self._left:
            self.abort()
            return
        if rest and self._target is not None:
            self._target[:rest] = self._head[end + 4 : self._head_length]
        self._took(rest)

    def _read_head(self, head: bytes) -> None:
        line, *fields = head.split(b"\r\n")
        words = line.split(b" ", 2)
        named = {
            name.strip().lower(): value.strip()
            for name, colon, value in (each.partition(b":") for each in fields)
            if colon
        }
        piece = self.piece
        length = named.get(b"content-length", b"0")
        if piece is None or len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not length.isdigit():
            self.abort()
            return
        self._status = int(words[1]) if words[1].isdigit() else 0
        self._left = int(length)
        self._closes = named.get(b"connection", b"").lower() == b"close"
        wanted = self._status == 200 and not piece.upload and not piece.transfer.over
        self._target = piece.body if wanted else None
        if wanted and self._left != len(piece.body):
            self._status = 500  # not the bytes that were asked for
            self._target = None

    def _took(self, nbytes: int) -> None:
        self._left -= nbytes
        self._owner.moved += nbytes
        if self._left > 0:
            return
        piece, status = self.piece, self._status
        self.piece, self._status, self._head_length, self._target = None, 0, 0, None
        assert piece is not None
        if self._closes or (piece.upload and self._sent < len(piece.body)):
            self.abort()
        self._owner.finished(self, piece, status)

    def eof_received(self) -> None:
        """See asyncio.BufferedProtocol: the transport closes."""

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._ended()

    def abort(self) -> None:
        """End the connection at once: its memory is touched no more."""
        transport = self._transport
        self._target = None
        if transport is not None:
            transport.abort()
        self._ended()

    def _ended(self) -> None:
        if self._transport is None:
            return
        self._transport, self.alive = None, False
        piece, self.piece = self.piece, None
        self._owner.lost(self, piece)
