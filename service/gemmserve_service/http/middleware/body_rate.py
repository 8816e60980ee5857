"""Bodies that trickle: a client that sends a byte a second holds a reservation for ever, so it is answered 408.

Only the time counts in which the app waits for the client: a body that the server itself is slow to read is not the
client's fault.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gemmserve_service.http.extensions import RECEIVER
from gemmserve_service.http.problems import RequestTimeout

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from gemmserve_service.http.extensions import Receiver
    from gemmserve_service.settings import Settings
    from gemmserve_service.store.extents.extents import Place


class BodyRate:
    """Raises RequestTimeout in the app when less than `min_body_rate` bytes a second come over `body_window_s`."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._window_s = settings.body_window_s
        self._least = settings.min_body_rate * settings.body_window_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http" and self._least:
            receive = timed = _Timed(receive, self._window_s, self._least)
            extensions = scope.get("extensions") or {}
            if RECEIVER in extensions:
                timed.receiver = extensions[RECEIVER]
                scope["extensions"] = {**extensions, RECEIVER: timed}
        await self._app(scope, receive, send)


class _Timed:
    """`receive` and `Receiver` of one request, under the clock until the body is whole."""

    __slots__ = ("_came", "_least", "_receive", "_waited", "_whole", "_window_s", "receiver")

    def __init__(self, receive: Receive, window_s: float, least: float) -> None:
        self._receive = receive
        self._window_s = window_s
        self._least = least
        self._whole = False
        self._waited = 0.0
        self._came = 0
        self.receiver: Receiver | None = None

    async def read_into(self, view: memoryview, patience_s: float) -> int:
        """See `extensions.Receiver`."""
        assert self.receiver is not None
        return await self._counted(self.receiver.read_into(view, self._at_most(patience_s)))

    def movable(self, count: int) -> bool:
        """See `extensions.Receiver`."""
        assert self.receiver is not None
        return self.receiver.movable(count)

    async def move_into(self, place: Place, count: int, patience_s: float) -> int:
        """See `extensions.Receiver`."""
        assert self.receiver is not None
        return await self._counted(self.receiver.move_into(place, count, self._at_most(patience_s)))

    def _at_most(self, patience_s: float) -> float:
        return min(patience_s, self._window_s - self._waited)

    async def _counted(self, coming: Awaitable[int]) -> int:
        began = asyncio.get_running_loop().time()
        count = await coming
        self._waited += asyncio.get_running_loop().time() - began
        self._came += count
        self._judge()
        return count

    async def __call__(self) -> Message:
        if self._whole:
            return await self._receive()
        while True:
            began = asyncio.get_running_loop().time()
            message: Message | None = None
            try:
                async with asyncio.timeout(self._window_s - self._waited):
                    message = await self._receive()
            except TimeoutError:
                self._waited = self._window_s
            else:
                self._waited += asyncio.get_running_loop().time() - began
                self._came += len(message.get("body", b""))
                self._whole = message["type"] != "http.request" or not message.get("more_body", False)
            self._judge()
            if message is not None:
                return message

    def _judge(self) -> None:
        """Judge the rate at the end of a window. Raises RequestTimeout."""
        if self._waited < self._window_s:
            return
        if self._came < self._least and not self._whole:
            raise RequestTimeout(
                f"{self._came} bytes came within {self._window_s:g} s, and {self._least:g} are the least"
            )
        self._waited, self._came = 0.0, 0
