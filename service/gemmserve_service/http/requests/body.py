"""A request's body as routes read it: in pieces, or straight into the memory where its bytes belong; and behind it,
whether its client is still there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.requests import ClientDisconnect

from gemmserve_service.http.extensions import RECEIVER
from gemmserve_service.store.extents.prefault import Prefault

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.types import Receive

    from gemmserve_service.http.extensions import Receiver
    from gemmserve_service.store.extents.extents import Place

_LOOK_S: Final = 0.005  # a product that is done sooner is not worth a look
_PATIENCE_S: Final = 0.1  # after which others see how far a slow client's body has come


def media_type_of(request: Request) -> str:
    """Return the body's media type, without parameters; "" where there is none."""
    return request.headers.get("content-type", "").split(";")[0].strip().lower()


class RequestBody:
    """Reads each byte once; pieces and direct reads may alternate. Every method raises ClientDisconnect."""

    def __init__(self, request: Request) -> None:
        self._receive = request.receive
        self._receiver: Receiver | None = request.scope.get("extensions", {}).get(RECEIVER)
        self._rest = memoryview(b"")
        self._more = True

    async def piece(self) -> bytes | memoryview:
        """The next bytes, as many as are there; empty at the end."""
        if self._rest:
            piece, self._rest = self._rest, memoryview(b"")
            return piece
        while self._more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            self._more = message.get("more_body", False)
            if body := message.get("body", b""):
                return bytes(body)
        return b""

    def unread(self, piece: bytes | memoryview) -> None:
        """Gives back the end of what `piece` returned last."""
        assert not self._rest
        self._rest = memoryview(piece)

    async def fill(self, view: memoryview, advance: Callable[[int], None], place: Place | None = None) -> bool:
        """Reads into `view` until it is full, or the body has ended: then False. `advance(n)`: n more bytes came.

        `place`: where `view` begins, if a transfer process may fill it.
        """
        position = 0
        ahead = Prefault(view)
        while position < len(view):
            if place is not None and self._movable(len(view) - position):
                assert self._receiver is not None
                count = await self._receiver.move_into(place.at(position), len(view) - position, _PATIENCE_S)
                if count:
                    position += count
                    advance(count)
                    continue
            end = await ahead.next(position)
            while position < end:
                count = await self._read_into(view[position:end])
                if not count:
                    return False
                position += count
                advance(count)
                if place is not None and self._movable(len(view) - position):
                    break
        return True

    def _movable(self, count: int) -> bool:
        return self._receiver is not None and self._more and not self._rest and self._receiver.movable(count)

    async def _read_into(self, view: memoryview) -> int:
        """Reads some of the next bytes; returns their number, 0 at the end."""
        while True:
            if self._rest or self._receiver is None or not self._more:
                piece = memoryview(await self.piece())
                count = min(len(piece), len(view))
                view[:count] = piece[:count]
                self._rest = piece[count:]
                return count
            if count := await self._receiver.read_into(view, _PATIENCE_S):
                return count
            # Nothing for a while, or the end: `piece` knows, and waits for more if it is not.
            self._rest = memoryview(await self.piece())
            if not self._rest:
                return 0


async def until_disconnect(receive: Receive) -> None:
    """Returns when the client has hung up; to be started once the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
