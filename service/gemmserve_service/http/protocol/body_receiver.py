"""Large bodies without copies: received straight into memory that the app names, and sent from where they lie.

Bytes that pass the parser and ASGI were copied four times on their way. Once an app knows where the bytes of a body
belong, the transport is given another protocol, one with a buffer (`asyncio.BufferedProtocol`) that is that place, so
the kernel's copy is the only one. The parser does not see such bytes (`RequestParser.skip`).

Both objects are in the extensions of the ASGI scope; `requests.body.RequestBody` and `answers.pieces.PiecesResponse`
use them where they are. Where there are transfer processes one of them reads from the connection instead, or writes to
it, a stretch at a time; this process keeps the connection, and looks after slow clients itself, and after one that is
alone with it, as long as it is, for what is not very large.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Final, Literal

from starlette.requests import ClientDisconnect

from gemmserve_service.http.transfer.protocol import End

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_service.http.protocol.asgi_cycle import AsgiCycle
    from gemmserve_service.http.protocol.connection import Connection
    from gemmserve_service.http.transfer.protocol import Transferred
    from gemmserve_service.store.extents.extents import Place

_DIRECT_FROM: Final = 1 << 16  # bytes that must be outstanding; below, changing protocols costs more than it saves
_MAX_READ: Final = 1 << 19  # bytes of one read: others' turn comes after at most a third of a millisecond ...
_READS_IN_A_TURN: Final = 4  # ... or after so many reads: uvloop reads on, 32 times, for as long as there is more
MOVED_FROM: Final = 1 << 20
"""Bytes that are worth a word to a transfer process."""
ALONE_BELOW: Final = 16 << 20
"""Bytes that this process moves itself for a connection that is alone: two wakes of a process are a third of a
millisecond, and there is nobody who would wait."""
_MAX_MOVE: Final = 32 << 20  # what it is asked for: a round trip for each 10 to 20 ms of a fast client's bytes
_LAST_READ_TURNS: Final = 3  # of the event loop: it looks at the socket, reads, and the read is told
_TCP: Final = {socket.AF_INET, socket.AF_INET6}
_SLOW: Final = 1 << 20  # bytes; a client of whom no more came, or who took no more, within the patience is slow ...
_BY_HAND: Final = 4 << 20  # ... and so many bytes go by this process before the next try


class _Direction:
    """One body's way past ASGI. `on_bytes` is told how many bytes took it; it is the middleware's to set."""

    def __init__(self, connection: Connection, cycle: AsgiCycle) -> None:
        self._connection = connection
        self._cycle = cycle
        self._by_hand = 0  # bytes that this process moves before it asks another
        self.on_bytes: Callable[[int], None] = _ignore

    def _worth_moving(self, count: int) -> bool:
        """Whether a transfer process is free for so many bytes, and can use the connection as it is: it is open, and
        without TLS.
        """
        connection, transport = self._connection, self._connection.transport
        return (
            connection.transfers is not None
            and count >= MOVED_FROM
            and self._by_hand <= 0
            and not (count < ALONE_BELOW and connection.alone)
            and not self._cycle.disconnected
            and not transport.is_closing()
            and transport.get_extra_info("sslcontext") is None
            and transport.get_extra_info("socket") is not None
            and connection.transfers.free()
        )

    async def _move(self, direction: Literal["in", "out"], place: Place, count: int, patience_s: float) -> int:
        """Lets a transfer process move bytes of the request's body, or of its answer; returns how many it moved.

        Raises ClientDisconnect when the client is gone, or the connection has to be broken.
        """
        connection, transport = self._connection, self._connection.transport
        assert connection.transfers is not None
        ends: list[Transferred | None] = []
        if direction == "in":
            connection.flow.pause_reading()
        try:
            descriptor = transport.get_extra_info("socket").fileno()
            await connection.transfers.transfer(direction, descriptor, place, count, patience_s, ends.append)
        finally:
            moved = ends[0] if ends else None
            if moved is not None and moved.count and direction == "in":
                connection.body_received(moved.count)
            if ends and (moved is None or moved.end is End.HANGUP):
                transport.abort()
        done = 0 if moved is None else moved.count
        if done < min(count, _SLOW):
            self._by_hand = _BY_HAND
        if transport.is_closing() and (moved is None or moved.end is not End.DONE):
            transport.abort()
            while not connection.lost:  # noqa: ASYNC110 (one of the next turns of the loop calls `connection_lost`)
                await asyncio.sleep(0)
            if direction == "out" or not done:
                raise ClientDisconnect  # else the next one hears of it: what came of an upload in parts stays
        return done


class BodyReceiver(_Direction):
    """One request's body; a `Receiver`. `on_bytes` is told 0 when the client is told to go on sending."""

    async def read_into(self, view: memoryview, patience_s: float) -> int:
        """See `Receiver`."""
        cycle, connection = self._cycle, self._connection
        if cycle.send_continue():
            self.on_bytes(0)
        if not cycle.body and cycle.more_body and not cycle.disconnected:
            if min(connection.body_left(cycle), len(view)) >= _DIRECT_FROM:
                count = await self.receive_directly(view, patience_s)
                self._by_hand -= count
                self.on_bytes(count)
                if not count and cycle.disconnected:
                    raise ClientDisconnect
                return count
            await self._wait(patience_s)
        if cycle.disconnected:
            raise ClientDisconnect
        count = min(len(view), len(cycle.body))
        view[:count] = cycle.body[:count]
        cycle.body = cycle.body[count:]
        self.on_bytes(count)
        return count

    async def receive_directly(self, view: memoryview, patience_s: float) -> int:
        """Lets the socket read into `view`; returns how many bytes came."""
        connection = self._connection
        sink = _Sink(connection, view[: min(len(view), connection.body_left(self._cycle))])
        patience = connection.loop.call_later(patience_s, sink.take_the_rest)
        sink.enter()
        try:
            await sink.done
        finally:
            patience.cancel()
            sink.leave()
            if sink.filled:
                connection.body_received(sink.filled)
        return sink.filled

    def movable(self, count: int) -> bool:
        """See `Receiver`."""
        cycle = self._cycle
        return (
            self._worth_moving(count)
            and self._connection.body_left(cycle) >= MOVED_FROM
            and not cycle.body
            and not cycle.expects_continue
        )

    async def move_into(self, place: Place, count: int, patience_s: float) -> int:
        """See `Receiver`."""
        if not self.movable(count):
            return 0
        count = min(count, self._connection.body_left(self._cycle), _MAX_MOVE)
        moved = await self._move("in", place, count, patience_s)
        self.on_bytes(moved)
        return moved

    async def _wait(self, patience_s: float) -> None:
        """Waits for a piece by way of the parser."""
        changed = self._cycle.changed
        changed.clear()
        self._connection.read_on()
        try:
            async with asyncio.timeout(patience_s):
                await changed.wait()
        except TimeoutError:
            return
        finally:
            changed.set()  # `receive` looks for itself what there is


class BodySender(_Direction):
    """One answer's body, on its way out."""

    def sendable(self, count: int) -> bool:
        """Whether a transfer process might send the next `count` bytes of the answer just now."""
        cycle = self._cycle
        return (
            self._worth_moving(count)
            and cycle.started
            and not cycle.complete
            and cycle.remaining is not None
            and cycle.remaining >= count
        )

    async def send_from(self, place: Place, count: int, patience_s: float) -> int:
        """Sends the answer's next bytes by a transfer process from `place`, behind what was sent before; returns how
        many went. 0: it is better not asked now. Raises ClientDisconnect.
        """
        if not self.sendable(count):
            return 0
        cycle, transport = self._cycle, self._connection.transport
        transport.set_write_buffer_limits(0)  # so that `drain` waits until the socket has everything
        try:
            await self._connection.flow.drain()
            if cycle.disconnected:
                raise ClientDisconnect
            if not self.sendable(count):  # while the client took what had been written
                return 0
            moved = await self._move("out", place, min(count, _MAX_MOVE), patience_s)
        finally:
            if not transport.is_closing():
                transport.set_write_buffer_limits()
        assert cycle.remaining is not None
        cycle.remaining -= moved
        self.on_bytes(moved)
        return moved

    def sent(self, count: int) -> None:
        """Counts bytes of the answer that went through ASGI."""
        self._by_hand -= count


class _Sink(asyncio.BufferedProtocol):
    """Stands in for a connection's protocol while `view` fills.

    The kernel would have it called for every segment, 64 KiB by the loopback, where it is faster than the client: it is
    called when there is a whole read (SO_RCVLOWAT of socket(7), of TCP alone), or with what has come by the end of its
    patience.
    """

    def __init__(self, connection: Connection, view: memoryview) -> None:
        self._connection = connection
        self._view = view
        self._inside = False
        self._socket = _tcp_socket(connection.transport)
        self._low_water = 1
        self._last = False  # whether it leaves with the next read
        self._alone = connection.alone
        self._reads = 0  # in this turn of the event loop, where it is not alone
        self.filled = 0
        self.done: asyncio.Future[None] = connection.loop.create_future()

    def enter(self) -> None:
        """Takes the protocol's place. Reading is paused meanwhile: which callbacks a transport uses is decided when it
        begins to read.
        """
        flow = self._connection.flow
        flow.pause_reading()
        self._connection.transport.set_protocol(self)
        self._inside = True
        self._wait_for(min(len(self._view), _MAX_READ))
        flow.resume_reading()

    def take_the_rest(self) -> None:
        """Leave with what has come, however little that is."""
        if self._low_water > 1 and self._inside and not self._connection.transport.is_closing():
            self._last = True
            self._wait_for(1)
            self._connection.flow.pause_reading()
            self._connection.flow.resume_reading()  # which has the event loop ask anew what there is to be read
            self._leave_in(_LAST_READ_TURNS)
        else:
            self.leave()

    def _leave_in(self, turns: int) -> None:
        """Leave after so many turns of the event loop."""
        if turns:
            self._connection.loop.call_soon(self._leave_in, turns - 1)
        else:
            self.leave()

    def leave(self) -> None:
        """Gives the place back, with reading paused; idempotent."""
        if self._inside:
            self._inside = False
            if not self._connection.transport.is_closing():
                self._connection.flow.pause_reading()
                self._wait_for(1)
            self._connection.transport.set_protocol(self._connection)
        if not self.done.done():
            self.done.set_result(None)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self._view[self.filled : self.filled + _MAX_READ]

    def buffer_updated(self, nbytes: int) -> None:
        self.filled += nbytes
        left = len(self._view) - self.filled
        if not left or self._last:
            self.leave()
            return
        if left < self._low_water:
            self._wait_for(left)
        if not self._alone:
            self._count_read()

    def _count_read(self) -> None:
        """Pause when its reads of this turn are done."""
        if not self._reads:
            self._connection.loop.call_soon(self._begin_turn)
        self._reads += 1
        if self._reads == _READS_IN_A_TURN:
            self._connection.flow.pause_reading()

    def _begin_turn(self) -> None:
        """Read on: others have had their turn."""
        self._reads = 0
        if self._inside and not self._connection.transport.is_closing():
            self._connection.flow.resume_reading()

    def eof_received(self) -> bool | None:
        return None  # in the middle of a body: nothing more can come of it

    def connection_lost(self, exc: Exception | None) -> None:
        self._inside = False
        self._connection.connection_lost(exc)
        self.leave()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def _wait_for(self, count: int) -> None:
        """Have the kernel wait until so many bytes have come."""
        if self._socket is not None and count != self._low_water:
            with contextlib.suppress(OSError):  # of a connection that is broken; the loop will hear of it
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._low_water = count


def _tcp_socket(transport: asyncio.Transport) -> socket.socket | None:
    """Return the socket of a TCP connection whose bytes are the body's, without TLS; else None."""
    found: socket.socket | None = transport.get_extra_info("socket")
    if found is None or found.family not in _TCP or transport.get_extra_info("sslcontext") is not None:
        return None
    return found


def _ignore(_: int) -> None:
    """Counter of a body that no middleware counts."""
