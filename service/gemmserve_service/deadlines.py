"""Moments by which things must have happened, most of which have long before: one timer of the loop's for all of them.

A timer for each costs as much as all else that is done to queue a small product.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_MOST_PAST: Final = 256  # things that need no deadline any more, before they are looked for

_EARLY_S: Final = 1e-3  # uvloop's timers are whole milliseconds


class Deadlines(Generic[T]):
    """`expire(thing)` is called at its moment, unless `over(thing)` by then. Belongs to the event loop's thread."""

    def __init__(self, expire: Callable[[T], None], over: Callable[[T], bool]) -> None:
        self._expire = expire
        self._over = over
        self._heap: list[tuple[float, int, T]] = []
        self._order = itertools.count()
        self._most = _MOST_PAST
        self._timer: asyncio.TimerHandle | None = None

    def add(self, thing: T, seconds: float) -> None:
        """It expires in so long."""
        loop = asyncio.get_running_loop()
        if len(self._heap) >= self._most:
            self._heap = [entry for entry in self._heap if not self._over(entry[2])]
            heapq.heapify(self._heap)
            self._most = 2 * len(self._heap) + _MOST_PAST
        when = loop.time() + max(seconds, 0.0)
        heapq.heappush(self._heap, (when, next(self._order), thing))
        if self._timer is None or when < self._timer.when():
            self._wind(loop)

    def stop(self) -> None:
        """Nothing expires any more."""
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wind(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(self._heap[0][0], self._due) if self._heap else None

    def _due(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        try:
            while self._heap and (self._heap[0][0] <= loop.time() + _EARLY_S or self._over(self._heap[0][2])):
                thing = heapq.heappop(self._heap)[2]
                if not self._over(thing):
                    self._expire(thing)
        finally:
            if self._timer is None:  # an expiry may have led to another deadline
                self._wind(loop)
