"""Long work in the event loop's thread, a few milliseconds at a time, or less while others are about: they get
their turn in between.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, ClassVar, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

T = TypeVar("T")

_SPAN_S: Final = 0.005  # what a small request takes with its product; no measurement behind the figure
_BRIEF_S: Final = 0.0005
"""Likewise, while others are about: five small requests have thirty steps together, each of which may wait for one turn
of this. Beside turns of five milliseconds they took 150, and 10 in peace."""
_ABOUT_S: Final = 0.02  # after which somebody who has done something is expected no more
_NOTHING_S: Final = 0.0001  # a turn of the event loop in which nobody does anything takes a fifth of that
_MAX_OTHERS_S: Final = 0.001  # what others are given in one go, as long as they have something to do
_MAX_AT_ONCE: Final = 64  # things of some microseconds each


class Turns:
    """Source of pauses: asked for one after every part of the work, it makes it when it is due."""

    _others_at: ClassVar[float] = -math.inf
    """Time at which others last did something while anybody paused."""

    def __init__(self) -> None:
        self._begin(time.perf_counter())

    async def pause(self) -> None:
        """Lets the event loop turn if this work has had it for long enough: once, and on as long as others are busy."""
        began = before = time.perf_counter()
        if before < self._until:
            return
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            if now - before < _NOTHING_S:
                break
            Turns._others_at = now
            if now - began >= _MAX_OTHERS_S:
                break
            before = now
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._until = now + (_BRIEF_S if now - Turns._others_at < _ABOUT_S else _SPAN_S)

    async def slices(self, things: Sequence[T]) -> AsyncIterator[Sequence[T]]:
        """All of them, some at a time, with a pause in between when it is due: for many things that take little each,
        with a look at the clock.
        """
        for low in range(0, len(things), _MAX_AT_ONCE):
            await self.pause()
            yield things[low : low + _MAX_AT_ONCE]
