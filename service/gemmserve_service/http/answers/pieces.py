"""Answers made of bytes that lie in an extent: sent in pieces, pinned until the last one, zipped on the way."""

from __future__ import annotations

import asyncio
import io
import zipfile
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final, Self

from starlette.requests import ClientDisconnect
from starlette.responses import Response

from gemmserve.wire import PIECE
from gemmserve_service.http.extensions import SENDER
from gemmserve_service.http.requests.body import until_disconnect
from gemmserve_service.store.extents.extents import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from starlette.types import Receive, Scope, Send

    from gemmserve_service.http.extensions import Sender
    from gemmserve_service.store.extents.extents import Extent

PROBLEMS_MEMBER: Final = "problems.json"
_PATIENCE_S: Final = 0.1  # as with bodies that come
_AT_ONCE: Final = 1 << 18  # bytes of small members that are sent together

Buffer = bytes | memoryview


class Pieces:
    """The bytes `span` of the concatenated parts, at most `PIECE` at a time, where they lie.

    A transport may hold the last of them past the pin: until it lets go, the extent is not `quiescent`, so no other
    array gets it. `extent`: where the last part lies, from the extent's first byte on, if a transfer process may send
    it: what it sent is passed over by `skip`.
    """

    def __init__(self, parts: Sequence[Buffer], span: range, extent: Extent | None = None) -> None:
        self._parts = parts
        self._extent = extent
        self._part = 0
        self._before = 0  # bytes of the parts before that one
        self._position, self._stop = span.start, span.stop

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Buffer:
        while self._position < self._stop:
            part = self._parts[self._part]
            low, high = self._position - self._before, min(self._stop - self._before, len(part))
            if low < high:
                end = min(low + PIECE, high)
                self._position = self._before + end
                return part[low:end]
            self._part += 1
            self._before += len(part)
        raise StopIteration

    def ahead(self) -> tuple[Place, int] | None:
        """Place of the next bytes, and their number, if they all lie in the extent."""
        before = sum(map(len, self._parts[:-1]))
        if self._extent is None or self._position < before:
            return None
        return Place(self._extent, self._position - before), self._stop - self._position

    def skip(self, count: int) -> None:
        """Passes over bytes of those ahead, which were sent."""
        self._position += count


def npz_pieces(arrays: Mapping[str, Sequence[Buffer]], problems: Mapping[int, str] = {}) -> Iterator[bytes]:
    """An uncompressed .npz, written as it is sent: sizes and CRCs follow each member (bit 3 of its flags).

    `arrays`: the parts of each .npy file. `problems`: JSON by number, as a member that `numpy.load` gives as bytes.
    """
    sink = _Sink()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:
        for name, parts in arrays.items():
            size = sum(map(len, parts))
            # The date of the DOS epoch: equal results give equal files.
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=size >= zipfile.ZIP64_LIMIT) as member:
                for piece in Pieces(parts, range(size)):
                    member.write(piece)
                    if sink.held > _AT_ONCE:
                        yield sink.take()
        if problems:
            with archive.open(zipfile.ZipInfo(PROBLEMS_MEMBER), "w") as member:
                before = "{"
                for number, problem in problems.items():
                    member.write(f'{before}"{number}": {problem}'.encode("ascii"))
                    before = ", "
                    if sink.held > _AT_ONCE:
                        yield sink.take()
                member.write(b"}")
    yield sink.take()


class _Sink(io.RawIOBase):
    """A file that cannot seek and gives away what was written."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self.held = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._pieces.append(bytes(data))
        self.held += len(self._pieces[-1])
        return len(self._pieces[-1])

    def take(self) -> bytes:
        """Return what was written since the last call."""
        taken = b"".join(self._pieces)
        self._pieces.clear()
        self.held = 0
        return taken


class PiecesResponse(Response):
    """Sends an iterator of pieces and calls `release` once nothing reads the extents any more, whatever happens.

    `length` None: the length is not known in advance, and the transport frames it in chunks.
    """

    def __init__(
        self,
        content: Iterator[Buffer] | AsyncIterator[Buffer],
        *,
        length: int | None,
        status_code: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: str,
        release: Callable[[], None],
    ) -> None:
        self._content = content
        self._release = release
        self.status_code = status_code
        self.media_type = media_type
        self.background = None
        self.init_headers(headers)
        if length is not None:
            self.headers["Content-Length"] = str(length)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stops at the next piece when the client has hung up."""
        hangup = asyncio.ensure_future(until_disconnect(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if scope["method"] != "HEAD":
                sender: Sender | None = (scope.get("extensions") or {}).get(SENDER)
                if sender is not None and isinstance(self._content, Pieces) and _movable(self._content, sender):
                    await send({"type": "http.response.body", "body": b"", "more_body": True})  # has the head written
                    await _moved(self._content, sender, hangup)
                async for piece in _in_turn(self._content):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    # A transport whose buffer never fills never waits: give others their turn.
                    await asyncio.sleep(0)
                    if hangup.done():
                        return
                    if sender is not None and isinstance(self._content, Pieces):
                        sender.sent(len(piece))
                        await _moved(self._content, sender, hangup)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientDisconnect:
            return
        finally:
            hangup.cancel()
            self._release()


def _movable(content: Pieces, sender: Sender) -> tuple[Place, int] | None:
    ahead = content.ahead()
    return ahead if ahead is not None and sender.sendable(ahead[1]) else None


async def _moved(content: Pieces, sender: Sender, hangup: asyncio.Future[None]) -> None:
    """Lets a transfer process send what lies ahead, as long as that goes on well."""
    while (ahead := _movable(content, sender)) is not None and not hangup.done():
        count = await sender.send_from(*ahead, _PATIENCE_S)
        if not count:
            return
        content.skip(count)


async def _in_turn(content: Iterator[Buffer] | AsyncIterator[Buffer]) -> AsyncIterator[Buffer]:
    if isinstance(content, AsyncIterator):
        async for piece in content:
            yield piece
    else:
        for piece in content:
            yield piece
