"""Bodies that land in their final place: the socket is read straight into memory that the app names.

uvicorn hands a body over in pieces that were copied four times on their way (uvloop, httptools, twice uvicorn). Once an
app knows where the bytes of a body belong, the connection's protocol is changed for one with a buffer
(`asyncio.BufferedProtocol`) whose buffer is that place, so the kernel's copy is the only one. The parser does not see
such bytes; it has counted the body's length by then, so the rest of that body passes it by, and the next request on the
connection gets a fresh one.

`LandingProtocol` puts a `Landing` into the scope's extensions; `bodies.RequestBody` uses it where there is one. Where
there are transfer processes one of them reads from the connection instead, or writes to it, a stretch at a time; this
process keeps the connection, and looks after slow clients itself.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import httptools
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gemmserve_service.http.transfer.protocol import End

if TYPE_CHECKING:
    from collections.abc import Callable

    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from gemmserve_service.http.transfer.pool import TransferPool
    from gemmserve_service.http.transfer.protocol import Transferred
    from gemmserve_service.store.extents.extents import Place

EXTENSION: Final = "gemmserve.landing"
"""Key in the ASGI scope's `extensions`, of a `Lander`."""
SENDING: Final = "gemmserve.sending"
"""Likewise, of what sends bytes of the answer from where they lie (`Landing`)."""

_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})
_DIRECT_FROM: Final = 1 << 16  # bytes that must be outstanding; below, changing protocols costs more than it saves
_MOST_AT_ONCE: Final = 1 << 19  # bytes of one read: others' turn comes after at most a third of a millisecond
MOVED_FROM: Final = 1 << 20
"""Bytes that are worth a word to a transfer process."""
_MOVED_AT_ONCE: Final = 32 << 20  # what it is asked for: a round trip for each 10 to 20 ms of a fast client's bytes
_SLOW: Final = 1 << 20  # bytes; a client of whom no more came, or who took no more, within the patience is slow ...
_BY_HAND: Final = 4 << 20  # ... and so many bytes go by this process before the next try


class Lander(Protocol):
    """What an app sees in its scope."""

    async def read_into(self, view: memoryview, patience_s: float) -> int:
        """Reads the body's next bytes to the start of `view`; returns how many came, when it is full, the body has
        ended, or `patience_s` have passed. Raises ClientDisconnect.
        """

    def movable(self, count: int) -> bool:
        """Whether a transfer process might be given the body's next `count` bytes just now."""

    async def move_into(self, place: Place, count: int, patience_s: float) -> int:
        """Like `read_into`, by a transfer process; 0 also when it is better not asked now: then read."""


class Landing:
    """One exchange's large bodies, for its app: the request's on its way in, the answer's on its way out."""

    def __init__(self, protocol: LandingProtocol) -> None:
        self._protocol = protocol
        self.cycle: RequestResponseCycle | None = None
        self.on_landed: list[Callable[[int], None]] = []
        """Told how many bytes came past `receive`, and 0 when the client is told to go on sending."""
        self.on_sent: list[Callable[[int], None]] = []
        """Told how many bytes of the answer went past `send`."""
        self.context: dict[str, str] | None = None
        """The request's id and trace (`middleware.context_of`), once they are known."""
        self.refused = 0
        """The status that the connection has answered with, when the request's body turned out to be malformed."""
        self._by_hand = 0  # bytes that this process moves before it asks another

    async def read_into(self, view: memoryview, patience_s: float) -> int:
        """See `Lander`."""
        cycle = self.cycle
        assert cycle is not None  # the app's task starts after the head was taken in
        if cycle.waiting_for_100_continue and not cycle.transport.is_closing():
            cycle.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            cycle.waiting_for_100_continue = False
            self._tell(0)
        if not cycle.body and cycle.more_body and not cycle.disconnected:
            protocol = self._protocol
            if protocol.cycle is cycle and (protocol.left or 0) >= _DIRECT_FROM and len(view) >= _DIRECT_FROM:
                count = await protocol.land(view, patience_s)
                self._by_hand -= count
                self._tell(count)
                if not count and cycle.disconnected:
                    raise ClientDisconnect
                return count
            await self._more(cycle, patience_s)
        if cycle.disconnected:
            raise ClientDisconnect
        count = min(len(view), len(cycle.body))
        view[:count] = cycle.body[:count]
        cycle.body = cycle.body[count:]
        self._tell(count)
        return count

    def movable(self, count: int) -> bool:
        """See `Lander`."""
        protocol, cycle = self._protocol, self.cycle
        assert cycle is not None
        return (
            self._worth_moving(count)
            and protocol.cycle is cycle
            and (protocol.left or 0) >= MOVED_FROM
            and not cycle.body
            and not cycle.waiting_for_100_continue
        )

    async def move_into(self, place: Place, count: int, patience_s: float) -> int:
        """See `Lander`."""
        protocol, cycle = self._protocol, self.cycle
        assert cycle is not None
        if not self.movable(count):
            return 0
        count = min(count, protocol.left or 0, _MOVED_AT_ONCE)
        moved = await protocol.move(cycle, "in", place, count, patience_s)
        if moved < min(count, _SLOW):
            self._by_hand = _BY_HAND
        self._tell(moved)
        return moved

    def sendable(self, count: int) -> bool:
        """Whether a transfer process might send the next `count` bytes of the answer just now."""
        cycle = self.cycle
        assert cycle is not None
        return (
            self._worth_moving(count)
            and cycle.response_started
            and not cycle.response_complete
            and cycle.expected_content_length >= count
        )

    async def send_from(self, place: Place, count: int, patience_s: float) -> int:
        """Has the answer's next bytes sent from `place`, behind what was sent before; returns how many went. 0: it is
        better not asked now. Raises ClientDisconnect.
        """
        protocol, cycle = self._protocol, self.cycle
        assert cycle is not None
        if not self.sendable(count):
            return 0
        transport = protocol.transport
        transport.set_write_buffer_limits(0)  # so that `drain` waits until the socket has everything
        try:
            await protocol.flow.drain()
            if cycle.disconnected:
                raise ClientDisconnect
            if not self.sendable(count):  # while the client took what had been written
                return 0
            count = min(count, _MOVED_AT_ONCE)
            moved = await protocol.move(cycle, "out", place, count, patience_s)
        finally:
            if not transport.is_closing():
                transport.set_write_buffer_limits()
        if moved < min(count, _SLOW):
            self._by_hand = _BY_HAND
        cycle.expected_content_length -= moved
        for callback in self.on_sent:
            callback(moved)
        return moved

    def sent(self, count: int) -> None:
        """So many bytes of the answer went the ordinary way."""
        self._by_hand -= count

    def _worth_moving(self, count: int) -> bool:
        """Whether a transfer process is free for so many bytes, and can use the connection as it is: it is open, and
        without TLS.
        """
        protocol, cycle = self._protocol, self.cycle
        assert cycle is not None
        transport = protocol.transport
        return (
            protocol.transfers is not None
            and count >= MOVED_FROM
            and self._by_hand <= 0
            and not cycle.disconnected
            and not transport.is_closing()
            and transport.get_extra_info("sslcontext") is None
            and transport.get_extra_info("socket") is not None
            and protocol.transfers.free()
        )

    @staticmethod
    async def _more(cycle: RequestResponseCycle, patience_s: float) -> None:
        """Waits for a piece the ordinary way."""
        cycle.message_event.clear()
        cycle.flow.resume_reading()
        try:
            async with asyncio.timeout(patience_s):
                await cycle.message_event.wait()
        except TimeoutError:
            return
        finally:
            cycle.message_event.set()  # `receive` looks for itself what there is

    def _tell(self, count: int) -> None:
        for callback in self.on_landed:
            callback(count)


class LandingProtocol(HttpToolsProtocol):
    """uvicorn's protocol; `left` are the bytes of the body that have not come, None where their number is unknown."""

    transfers: TransferPool | None = None
    """The transfer processes, where there are any; of the class that a server makes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.left: int | None = None
        self._past_parser = False
        self._lost = False
        self._sending = False
        """Whether a transfer process is sending."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        super().connection_lost(exc)

    def malformed(self, message: str) -> None:
        """Called when the parser cannot go on; `message` is llhttp's."""
        raise NotImplementedError

    def on_headers_complete(self) -> None:
        landing = Landing(self)
        self.scope["extensions"] = {EXTENSION: landing, SENDING: landing}  # type: ignore[dict-item]
        super().on_headers_complete()
        landing.cycle = self.cycle
        self.left = _content_length(self.headers)

    def on_message_complete(self) -> None:
        """The parser's, which takes a message with Upgrade for complete as soon as its head is (`_past_upgrade`)."""
        if not self.parser.should_upgrade():
            self.message_complete()

    def message_complete(self) -> None:
        """The request has come whole."""
        super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        if self.left is not None:
            self.left -= len(body)
        super().on_body(body)

    def data_received(self, data: bytes) -> None:
        if not self._past_parser:
            self._parse(data)
            return
        assert self.left is not None
        rest = data[self.left :]
        self.on_body(data[: self.left])
        self._look_for_the_end()
        if rest:
            self._parse(rest)

    def _parse(self, data: bytes) -> None:
        """As uvicorn's `data_received`, which would end a request with Upgrade at its head and drop what follows."""
        self._unset_keepalive_if_required()
        rest = memoryview(data)
        while True:
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as stopped:
                rest = rest[stopped.args[0] :]
                if self._past_upgrade() and rest:
                    continue
            except httptools.HttpParserError as error:
                self.malformed(str(error))
            return

    def _past_upgrade(self) -> bool:
        """Goes on behind a head with Upgrade, which is ignored (RFC 9110, section 7.8): llhttp stops there and takes
        what follows for another protocol. A parser that is given the head without that field knows the body's length.
        """
        framing = [b"%b: %b\r\n" % field for field in self.headers if field[0] in _FRAMING]
        self.parser = _parser(_BehindHead(self))
        try:
            self.parser.feed_data(b"".join([b"POST / HTTP/1.1\r\n", *framing, b"\r\n"]))
        except httptools.HttpParserError as error:
            self.malformed(str(error))
            return False
        return True

    async def land(self, view: memoryview, patience_s: float) -> int:
        """Has the socket read into `view`, of the body that is being received, and returns how many bytes came."""
        assert self.left is not None
        sink = _Sink(self, view[: min(len(view), self.left)])
        patience = self.loop.call_later(patience_s, sink.leave)
        sink.enter()
        try:
            await sink.done
        finally:
            patience.cancel()
            sink.leave()
            if sink.filled:
                self._past_parser = True
                self.left -= sink.filled
                self._look_for_the_end()
        return sink.filled

    async def move(
        self, cycle: RequestResponseCycle, direction: Literal["in", "out"], place: Place, count: int, patience_s: float
    ) -> int:
        """Has a transfer process move bytes of the request's body, or of its answer; returns how many it moved.

        Raises ClientDisconnect when the client is gone, or the connection has to be broken.
        """
        assert self.transfers is not None
        ends: list[Transferred | None] = []
        if direction == "in":
            self.flow.pause_reading()
        self._sending = direction == "out"
        try:
            connection = self.transport.get_extra_info("socket").fileno()
            await self.transfers.transfer(direction, connection, place, count, patience_s, ends.append)
        finally:
            moved = ends[0] if ends else None
            if moved is not None and moved.count and direction == "in":
                assert self.left is not None
                self._past_parser = True
                self.left -= moved.count
                self._look_for_the_end()
            if ends and (moved is None or moved.end is End.HANGUP):
                self.transport.abort()
            self._sending = False
        if self.transport.is_closing() and (moved is None or moved.end is not End.DONE):
            self.transport.abort()
            while not self._lost:  # noqa: ASYNC110 (one of the next turns of the loop calls `connection_lost`)
                await asyncio.sleep(0)
            cycle.disconnected = True  # uvicorn says so to the last cycle alone, which may be a later one
            if direction == "out" or moved is None or not moved.count:
                raise ClientDisconnect  # else the next one hears of it: what came of an upload in parts stays
        return 0 if moved is None else moved.count

    def _look_for_the_end(self) -> None:
        if self.left == 0 and self._past_parser:
            self._past_parser = False
            self.parser = _parser(self)
            self.message_complete()


def _parser(callbacks: object) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(callbacks)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
    return parser


class _BehindHead:
    """A protocol as the parser sees it that is given a head again: of that one head the protocol is not told."""

    def __init__(self, protocol: LandingProtocol) -> None:
        self._protocol = protocol
        self._within = True
        self.on_body = protocol.on_body
        self.on_message_complete = protocol.on_message_complete

    def on_message_begin(self) -> None:
        if not self._within:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._within:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._within:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._within:
            self._within = False
        else:
            self._protocol.on_headers_complete()


class _Sink(asyncio.BufferedProtocol):
    """Stands in for a protocol while `view` fills."""

    def __init__(self, protocol: LandingProtocol, view: memoryview) -> None:
        self._protocol = protocol
        self._view = view
        self._inside = False
        self.filled = 0
        self.done: asyncio.Future[None] = protocol.loop.create_future()

    def enter(self) -> None:
        """Takes the protocol's place. Reading is paused meanwhile: which callbacks a transport uses is decided when it
        begins to read.
        """
        flow = self._protocol.flow
        flow.pause_reading()
        self._protocol.transport.set_protocol(self)
        self._inside = True
        flow.resume_reading()

    def leave(self) -> None:
        """Gives the place back, with reading paused; idempotent."""
        if self._inside:
            self._inside = False
            if not self._protocol.transport.is_closing():
                self._protocol.flow.pause_reading()
            self._protocol.transport.set_protocol(self._protocol)
        if not self.done.done():
            self.done.set_result(None)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self._view[self.filled : self.filled + _MOST_AT_ONCE]

    def buffer_updated(self, nbytes: int) -> None:
        self.filled += nbytes
        if self.filled == len(self._view):
            self.leave()

    def eof_received(self) -> bool | None:
        return None  # in the middle of a body: nothing more can come of it

    def connection_lost(self, exc: Exception | None) -> None:
        self._inside = False
        self._protocol.connection_lost(exc)
        self.leave()

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()


def _content_length(headers: list[tuple[bytes, bytes]]) -> int | None:
    """The body's length; None for chunks. The parser has refused what is no number, or given twice."""
    found = dict(headers)
    if b"transfer-encoding" in found or b"content-length" not in found:
        return None
    return int(found[b"content-length"])
