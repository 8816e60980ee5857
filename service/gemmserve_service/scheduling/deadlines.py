"""Moments by which things must have happened, most of which have long before: one timer of the loop's for all of them.

A timer for each costs as much as all else that is done to queue a small product.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
Deadline = list[Any]
"""A moment by the loop's clock, a number that is its own, and the thing; None in its place once it is cancelled."""

_MAX_CANCELLED: Final = 256  # that are kept, beside as many as there are others
_EARLY_S: Final = 1e-3  # uvloop's timers are whole milliseconds


class Deadlines(Generic[T]):
    """`expire(thing)` is called at its moment, unless that is cancelled. Belongs to the event loop's thread."""

    def __init__(self, expire: Callable[[T], None]) -> None:
        self._expire = expire
        self._heap: list[Deadline] = []
        self._numbers = itertools.count()
        self._most = _MAX_CANCELLED
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        """Time of the timer, by the loop's clock: uvloop's does not know it where that is now, or past."""

    def add(self, thing: T, seconds: float) -> Deadline:
        """Add a task that expires in so many seconds."""
        loop = asyncio.get_running_loop()
        if len(self._heap) >= self._most:
            self._heap = [each for each in self._heap if each[2] is not None]
            heapq.heapify(self._heap)
            self._most = 2 * len(self._heap) + _MAX_CANCELLED
        when = loop.time() + max(seconds, 0.0)
        deadline = [when, next(self._numbers), thing]
        heapq.heappush(self._heap, deadline)
        if self._timer is None or when < self._timer_at:
            self._wind(loop)
        return deadline

    @staticmethod
    def cancel(deadline: Deadline) -> None:
        """Remove a deadline; its task is not held any more."""
        deadline[2] = None

    def stop(self) -> None:
        """Let nothing expire any more."""
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wind(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._heap:
            self._timer_at = self._heap[0][0]
            self._timer = loop.call_at(self._timer_at, self._due)

    def _due(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        try:
            while self._heap and (self._heap[0][2] is None or self._heap[0][0] <= loop.time() + _EARLY_S):
                thing = heapq.heappop(self._heap)[2]
                if thing is not None:
                    self._expire(thing)
        finally:
            if self._timer is None:  # an expiry may have led to another deadline
                self._wind(loop)
