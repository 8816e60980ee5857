"""Write orders: which results of a device are written next, and when.

At once what somebody waits for. Then the oldest: as long as the device has more than half of what it may keep, so that
the other half takes what is being computed; or after a while, for by then their owner may have deleted them, and what
is deleted is never written. While the device computes, small ones have several times as long: to write them takes the
link, and processors of both processes, from the stream of tasks that they are of. Last, and for want of room only, what
nobody can see any more and others were made of.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gemmserve_service.executor.port import Worker
    from gemmserve_service.store.pending import PendingResults

MAX_ORDERED_BYTES: Final = 2 << 30
"""Bytes that a worker is told to write at a time, beside what somebody waits for: a tenth of a second of its link."""
_KEEP_SHARE: Final = 2  # of what a device may keep, half stays while nobody needs the room
LARGE_BYTES: Final = 16 << 20
"""Bytes of results that wait for half of the time: they take long to write, and no more words than small ones."""
_MAX_KEPT: Final = 4096  # results' tasks that wait for nothing but their time: each is bookkeeping of both processes


class Urgency(IntEnum):
    """Order in which results are written."""

    WAITED_FOR = 0
    NORMAL = 1
    HIDDEN = 2


class WriteOrders:
    """The results that one worker's device has and was not told to write yet."""

    def __init__(self, worker: Worker, busy_s: float = 0.0) -> None:
        """`busy_s`: seconds that results of less than `LARGE_BYTES` have besides while the worker has tasks."""
        self.worker = worker
        self._busy_s = busy_s
        self.kept_bytes = 0
        """Bytes of results that it was not told to write, on record or not."""
        self.ordered_bytes = 0
        """Bytes of those that it was told to write, and has not."""
        self._waiting: dict[Urgency, dict[PendingResults, float]] = {urgency: {} for urgency in Urgency}
        """Results, and when they are due (time.monotonic), oldest first."""
        self._large: dict[PendingResults, float] = {}
        """Those of `LARGE_BYTES` and more that are of no particular urgency, likewise: they are due sooner."""
        self._queue_of: dict[PendingResults, dict[PendingResults, float]] = {}
        """Where results wait."""
        self._kept: set[PendingResults] = set()
        self._ordered: set[PendingResults] = set()
        self._expected: set[PendingResults] = set()

    def keep(self, pending: PendingResults) -> None:
        """Note that the device has these, and that they are not to be written before `offer`."""
        self._kept.add(pending)
        self.kept_bytes += pending.nbytes

    def offer(self, pending: PendingResults, urgency: Urgency, due: float = 0.0) -> None:
        """Let them be written from now on, or change their urgency. `due`: when at the latest (time.monotonic)."""
        if pending in self._kept:
            due = self._queue_of.pop(pending, {}).pop(pending, due)
            large = urgency is Urgency.NORMAL and pending.nbytes >= LARGE_BYTES
            queue = self._queue_of[pending] = self._large if large else self._waiting[urgency]
            queue[pending] = due

    @property
    def offers(self) -> bool:
        """Whether there are results that may be written."""
        return bool(self._queue_of)

    def next(self, now: float, *, hurry: bool) -> PendingResults | None:
        """Return the results that are to be written now. `hurry`: all are due."""
        waited_for, hidden = self._waiting[Urgency.WAITED_FOR], self._waiting[Urgency.HIDDEN]
        if waited_for:
            return next(iter(waited_for))
        if self.ordered_bytes >= MAX_ORDERED_BYTES:
            return None
        pressed = hurry or self.pressed
        first = self._first
        if first is not None:
            return first[0] if pressed or first[1] <= now else None
        return next(iter(hidden), None) if pressed else None

    @property
    def pressed(self) -> bool:
        """Whether the device is to have room made for more."""
        return self.kept_bytes * _KEEP_SHARE > self.worker.result_bytes or len(self._kept) > _MAX_KEPT

    @property
    def due(self) -> float | None:
        """Time at which the next results are due, if nothing hurries (time.monotonic); None: there are none."""
        return None if self._first is None else self._first[1]

    @property
    def _first(self) -> tuple[PendingResults, float] | None:
        """The results that are due first, and when."""
        small = next(iter(self._waiting[Urgency.NORMAL].items()), None)
        large = next(iter(self._large.items()), None)
        if small is not None and self._busy_s and self.worker.tasks:
            small = small[0], small[1] + self._busy_s
        return min(filter(None, (small, large)), key=lambda head: head[1], default=None)

    def ordered(self, pending: PendingResults) -> None:
        """Note that the worker was told to write them."""
        self._leave(pending)
        self._ordered.add(pending)
        self.ordered_bytes += pending.nbytes

    def expect(self, pending: PendingResults) -> None:
        """Note that somebody waits for results that the worker was told to write."""
        self._expected.add(pending)

    @property
    def expected(self) -> bool:
        """Whether there are such."""
        return bool(self._expected)

    def remove(self, pending: PendingResults) -> None:
        """Forget results that the device has no more, or that nobody needs."""
        self._leave(pending)
        self._expected.discard(pending)
        if pending in self._ordered:
            self._ordered.remove(pending)
            self.ordered_bytes -= pending.nbytes

    def _leave(self, pending: PendingResults) -> None:
        if pending in self._kept:
            self._kept.remove(pending)
            self.kept_bytes -= pending.nbytes
        self._queue_of.pop(pending, {}).pop(pending, None)
