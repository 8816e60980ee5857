"""Whether the client of a product is still there, asked once it has taken a while."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from gemmserve_service.http.answers.pieces import until_disconnect

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Receive

_LOOK_S: Final = 0.005  # a product that is done sooner is not worth a look


class Hangup:
    """Looks after a while whether the client is still there; `gone` is called when it is not."""

    def __init__(self, loop: asyncio.AbstractEventLoop, receive: Receive, gone: Callable[[], None]) -> None:
        self.seen = False
        self._receive = receive
        self._gone = gone
        self._watch: asyncio.Task[None] | None = None
        self._timer = loop.call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        self._watch = asyncio.ensure_future(until_disconnect(self._receive))
        self._watch.add_done_callback(self._ended)

    def _ended(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled() and watch.exception() is None:
            self.seen = True
            self._gone()

    def stop(self) -> None:
        """Looks no more."""
        self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()
