"""Long work in the event loop's thread, a few milliseconds at a time: others get their turn in between."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

T = TypeVar("T")

_SPAN_S: Final = 0.005  # what a small request takes with its product; no measurement behind the figure
_MOST_AT_ONCE: Final = 64  # things of some microseconds each


class Turns:
    """To be asked for a pause after every part of the work; the pause is made when it is due."""

    def __init__(self) -> None:
        self._until = time.perf_counter() + _SPAN_S

    async def pause(self) -> None:
        """Lets the event loop turn once if this work has had it for long enough."""
        if time.perf_counter() >= self._until:
            await asyncio.sleep(0)
            self._until = time.perf_counter() + _SPAN_S

    async def slices(self, things: Sequence[T]) -> AsyncIterator[Sequence[T]]:
        """All of them, some at a time, with a pause in between when it is due: for many things that take little each,
        with a look at the clock.
        """
        for low in range(0, len(things), _MOST_AT_ONCE):
            await self.pause()
            yield things[low : low + _MOST_AT_ONCE]
