"""Data exchange of one connection of the join port: HTTP/1.1 as far as nodes speak it, without any framework.

Bytes of operands are sent from the store's mappings piece by piece, and bytes of results are copied there piece by
piece, each after a look at the link and its tasks in the same turn of the event loop (`assignments`). What is looked at
cannot change before the piece is copied; what the transport has not sent yet of an operand is thrown away, with the
connection, when no task of the link reads it any more: the place may hold another array then. That is why nothing is
sent by the system's `sendfile`, whose pages are on their way while they may be written anew.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from gemmserve_service.executor.join_protocol import PROBE_BYTES, ReadExtent, WriteResult, parse_target
from gemmserve_service.executor.joined.assignments import Elsewhere, Stale

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from gemmserve_service.executor.joined.door import Door
    from gemmserve_service.executor.joined.link import Link

MAX_HEAD: Final = 8 << 10
"""Bytes of a request's line and headers."""
_PIECE: Final = 1 << 18
_TURN: Final = 1 << 22  # bytes that are sent in one turn of the event loop
_LINE: Final = re.compile(r"([A-Z]{3,8}) (/[!-~]{0,4095}) HTTP/1\.1")
_FIELD: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~]*?)[ \t]*")
_REASONS: Final = {
    200: "OK", 204: "No Content", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 409: "Conflict",
    410: "Gone", 431: "Request Header Fields Too Large", 503: "Service Unavailable",
}  # fmt: skip
_NOTHING: Final = memoryview(bytes(_PIECE))


class _Refusal(Exception):  # noqa: N818 (says what is the case)
    def __init__(self, status: int, slug: str) -> None:
        super().__init__(slug)
        self.status, self.slug = status, slug


class Exchange:
    """Requests of one connection, one after the other.

    `leave()` is told to close after what was written. The transport's buffer has the limit 0: it is empty whenever it
    is not paused.
    """

    def __init__(
        self,
        executor: Door,
        transport: asyncio.Transport,
        leave: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._executor = executor
        self._leave = leave
        self._head = bytearray()
        self.link: Link | None = None
        """Link whose secret it showed; its connections are counted, and end with it."""
        self._left = 0
        """Bytes of the body that have not come, or not been sent."""
        self._reading: ReadExtent | None = None
        self._sent = 0
        """Bytes of `_reading` that the transport was given."""
        self._writing: WriteResult | None = None
        self._row = 0
        """Bytes of one row of `_writing`."""
        self._at = 0
        """Bytes of `_writing` that are in their place."""
        self._sending = self._taking = False
        """Whether it is at an answer's body, or at a request's."""
        self._over = False
        self._paused = False

    @property
    def idle(self) -> bool:
        """Whether it is between two requests."""
        return not (self._head or self._sending or self._taking or self._over)

    @property
    def in_head(self) -> bool:
        """Whether a request's head has begun, and has not ended."""
        return bool(self._head) and not (self._sending or self._taking)

    @property
    def known(self) -> bool:
        """Whether it has shown the secret of a link that lives."""
        return self.link is not None

    # -- what comes -------------------------------------------------------------------------------------------------

    def feed(self, data: memoryview) -> None:
        """Take in what came: all of it, whatever becomes of it. The memory is the caller's again after this."""
        while len(data) and not self._over:
            if self._taking:
                piece, data = data[: self._left], data[self._left :]
                self._take(piece)
            elif self._sending:
                self._head += data  # of the next one, which came early
                if len(self._head) > MAX_HEAD:
                    self.abort()
                return
            else:
                data = self._take_head(data)

    def _take_head(self, data: memoryview) -> memoryview:
        """Take what belongs to the head; return what is behind it."""
        before = len(self._head)
        self._head += data[: MAX_HEAD + 4 - before]
        end = self._head.find(b"\r\n\r\n", max(before - 3, 0))
        if end < 0:
            if len(self._head) > MAX_HEAD:
                self._refuse(_Refusal(431, "head-too-long"))
                return data[:0]
            return data[len(self._head) - before :]
        head = bytes(self._head[:end])
        self._head.clear()
        try:
            self._begin(head)
        except _Refusal as refusal:
            self._refuse(refusal)
        return data[end + 4 - before :]

    def _begin(self, head: bytes) -> None:
        method, target, fields = _parsed(head)
        try:
            asked = parse_target(method, target)
        except ValueError:
            raise _Refusal(400, "malformed") from None
        length = _length(fields)
        if method == "GET" and length:
            raise _Refusal(400, "malformed")
        secret = _secret(fields)
        link = self._executor.link_of(secret)
        if link is None and not self._executor.had_link(secret):
            raise _Refusal(401, "unknown-link")
        if link is None or self.link not in {None, link}:
            if isinstance(asked, ReadExtent):
                raise _Refusal(410, "gone")
            self._executor.counts.stale_results += isinstance(asked, WriteResult)
            raise _Refusal(409, "stale-attempt")
        if self.link is None:
            if not link.enter(self):
                raise _Refusal(503, "too-many-connections")
            self.link = link
        if isinstance(asked, ReadExtent):
            self._begin_read(link, asked)
        elif isinstance(asked, WriteResult):
            self._begin_write(link, asked, length)
        elif method == "GET":
            self._send(asked.length)
        elif length > PROBE_BYTES:
            raise _Refusal(400, "malformed")
        else:
            self._left = length
            self._taking = True
            if not length:
                self._done()

    # -- operands ---------------------------------------------------------------------------------------------------

    def _begin_read(self, link: Link, asked: ReadExtent) -> None:
        if not asked.length or link.assignments.reads(*asked) is None:
            raise _Refusal(410, "gone")
        self._reading, self._sent = asked, 0
        self._send(asked.length)

    def _send(self, length: int) -> None:
        """Begin an answer with so many bytes, of `_reading` or of nothing."""
        self._sending, self._left = True, length
        self._answer(200, length)
        self.pump()

    def look(self) -> None:
        """Hang up on a node that is being sent what none of its tasks reads any more."""
        if self._reading is not None and self.link is not None and self.link.assignments.reads(*self._reading) is None:
            self.abort()

    def pump(self) -> None:
        """Send what the transport takes, some pieces in a turn of the event loop."""
        turn = _TURN
        while self._sending and self._left and turn > 0 and not (self._paused or self._over):
            piece = min(self._left, _PIECE)
            turn -= piece
            if self._reading is None:
                self._left -= piece
                self._transport.write(_NOTHING[:piece])
                continue
            assert self.link is not None
            file = self.link.assignments.reads(*self._reading)
            try:
                memory = None if file is None else self.link.memory(file)
            except (OSError, ValueError):
                memory = None
            if memory is None:
                self.abort()
                return
            start = self._reading.offset + self._sent
            self._sent += piece
            self._left -= piece
            self.link.count_fetched(piece)
            self._transport.write(memory[start : start + piece])
        if self._over or not self._sending or self._paused or self._transport.is_closing():
            return
        if self._left:
            self._soon()
        else:
            self._sent_all()

    def _soon(self) -> None:
        assert self.link is not None
        self.link.soon(self.pump)

    def paused(self, paused: bool) -> None:
        """Note that the transport has enough, or takes more."""
        self._paused = paused
        if not paused:
            self.pump()

    def _sent_all(self) -> None:
        """Go on with what came meanwhile: the transport has nothing of the answer any more."""
        self._reading, self._sending = None, False
        early, self._head = self._head, bytearray()
        if early:
            self.feed(memoryview(early))

    # -- results ----------------------------------------------------------------------------------------------------

    def _begin_write(self, link: Link, asked: WriteResult, length: int) -> None:
        row, rest = divmod(length, asked.rows)
        if rest or not length or (asked.rows > 1 and asked.stride < row):
            raise _Refusal(400, "malformed")
        try:
            link.assignments.writes(asked, row)
        except Stale:
            link.count_stale()
            raise _Refusal(409, "stale-attempt") from None
        except Elsewhere:
            raise _Refusal(403, "elsewhere") from None
        self._writing, self._row, self._at, self._left = asked, row, 0, length
        self._taking = True

    def _take(self, piece: memoryview) -> None:
        """Take a piece of a body: of a result to its place, if that is still the task's."""
        if self._writing is not None:
            assert self.link is not None
            try:
                self.link.write(self._writing, self._row, self._at, piece)
            except Stale:
                self.link.count_stale()
                self._refuse(_Refusal(409, "stale-attempt"))
                return
            except (Elsewhere, OSError, ValueError):
                self._refuse(_Refusal(409, "stale-attempt"))
                return
        self._at += len(piece)
        self._left -= len(piece)
        if not self._left:
            self._done()

    def _done(self) -> None:
        self._writing, self._taking = None, False
        self._answer(204, 0)

    # -- answers ----------------------------------------------------------------------------------------------------

    def _answer(self, status: int, length: int, *, close: bool = False, body: bytes = b"") -> None:
        lines = [f"HTTP/1.1 {status} {_REASONS[status]}"]
        if status != 204:
            lines.append(f"content-length: {length}")
        if body:
            lines.append("content-type: application/problem+json")
        if close:
            lines.append("connection: close")
        self._transport.write("\r\n".join([*lines, "", ""]).encode() + body)

    def _refuse(self, refusal: _Refusal) -> None:
        """Answer, and take nothing more of this connection."""
        self._over = True
        self._reading, self._writing, self._sending, self._taking, self._left = None, None, False, False, 0
        self._head.clear()
        body = json.dumps(
            {
                "type": f"/problems/{refusal.slug}",
                "title": refusal.slug.replace("-", " ").capitalize(),
                "status": refusal.status,
            }
        ).encode()
        self._answer(refusal.status, len(body), close=True, body=body)
        self._leave()

    def abort(self) -> None:
        """Hang up, and throw away what was not sent yet."""
        self._over = True
        self._transport.abort()

    def link_ended(self) -> None:
        """Note that the link is gone: a result under way is refused when it goes on, an operand is cut off."""
        if self._reading is not None:
            self.abort()

    def ended(self) -> None:
        """Note that the connection is gone."""
        self._over = True
        if self.link is not None:
            self.link.leave(self)


def _parsed(head: bytes) -> tuple[str, str, dict[str, str]]:
    try:
        first, *lines = head.decode("ascii").split("\r\n")
    except UnicodeDecodeError:
        raise _Refusal(400, "malformed") from None
    line = _LINE.fullmatch(first)
    if line is None:
        raise _Refusal(400, "malformed")
    fields: dict[str, str] = {}
    for text in lines:
        field = _FIELD.fullmatch(text)
        if field is None or field[1].lower() in fields:
            raise _Refusal(400, "malformed")
        fields[field[1].lower()] = field[2]
    if "transfer-encoding" in fields:
        raise _Refusal(400, "malformed")
    return line[1], line[2], fields


def _length(fields: dict[str, str]) -> int:
    text = fields.get("content-length", "0")
    if not text.isdigit() or len(text) > 18:
        raise _Refusal(400, "malformed")
    return int(text)


def _secret(fields: dict[str, str]) -> str:
    scheme, _, secret = fields.get("authorization", "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else ""
