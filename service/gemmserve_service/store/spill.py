"""Spill: results in the host arena on their way to files, by threads of the front.

The oldest go first: after a while, for by then their owner may have deleted them; or as soon as half of the arena is
taken. What nobody can see any more goes only then: others were made of it, and it is deleted when they are on disk. Of
long ones, results of large products, one goes at a time, so that there is a thread for the others.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from gemmserve_service.errors import StoreFull, TierUnavailable
from gemmserve_service.runtime.background import Background
from gemmserve_service.store.pending import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gemmserve_service.store.array_store import ArrayStore
    from gemmserve_service.store.extents.extents import Extent
    from gemmserve_service.store.pending import PendingResults

_THREADS: Final = 2  # one writes while the other waits for the disk; more would take the processors of the front
_STEP: Final = 8 << 20  # bytes of one call: so much is written at most of what was deleted meanwhile
_FLUSH: Final = 256 << 20  # bytes after which the disk is waited for in between
_LONG: Final = 256 << 20  # bytes of results that keep a thread for a tenth of a second and more
_KEEP_SHARE: Final = 2  # of the arena, half stays in it as long as nothing is due
_MIN_RETRY_S: Final = 0.1
_MAX_RETRY_S: Final = 5.0
_MAX_FAILING: Final = 16
"""Results whose files failed and that wait to be tried again, beyond which nothing new is begun: the disk is full."""

log = logging.getLogger(__name__)


class Spill:
    """Pending results that the host arena has. Everything happens in the event loop's thread but the copies."""

    def __init__(self, store: ArrayStore, spilled: Callable[[PendingResults], None]) -> None:
        """`spilled` is called, in the event loop's thread, when files have the bytes and the records name these."""
        self._store = store
        self._spilled = spilled
        self._waiting: OrderedDict[PendingResults, float] = OrderedDict()
        """Results, and when they are due (time.monotonic), oldest first."""
        self._long: OrderedDict[PendingResults, float] = OrderedDict()
        """Those of more than `_LONG` bytes, likewise."""
        self._hidden: dict[PendingResults, None] = {}
        """Results that nobody can see, likewise."""
        self._delays: dict[PendingResults, float] = {}
        """Results whose files failed, and the seconds after which they are tried again."""
        self._failing: dict[PendingResults, asyncio.TimerHandle] = {}
        """Those of them that wait for that."""
        self._copying = 0
        self._copying_long = False
        self._hurry = False
        self._stopping = asyncio.Event()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="gemmserve-spill")
        self._background = Background()
        self._timer: asyncio.TimerHandle | None = None

    def put(self, pending: PendingResults) -> None:
        """Take over results that are in the arena."""
        self._queue_of(pending)[pending] = time.monotonic() + self._store.settings.write_back_delay_s
        self.look()

    def discard(self, pending: PendingResults) -> None:
        """Leave results alone that nobody needs; they are in another state than HOST."""
        self._queue_of(pending).pop(pending, None)
        self._hidden.pop(pending, None)
        self._delays.pop(pending, None)
        timer = self._failing.pop(pending, None)
        if timer is not None:
            timer.cancel()
            self.look()

    def hurry(self) -> None:
        """Copy all that there is, and whatever comes, without delay."""
        self._hurry = True
        self.look()

    def look(self) -> None:
        """Begin with what is to be copied now."""
        while self._copying < _THREADS and len(self._failing) < _MAX_FAILING and not self._stopping.is_set():
            pending = self._next()
            if pending is None:
                return
            self._queue_of(pending).pop(pending, None)
            self._hidden.pop(pending, None)
            self._copying += 1
            self._copying_long |= _is_long(pending)
            self._background.spawn(self._copy(pending))

    async def stop(self) -> None:
        """Return when nothing is being copied; what is in the arena alone is computed again after the next start."""
        self._stopping.set()
        for timer in (self._timer, *self._failing.values()):
            if timer is not None:
                timer.cancel()
        await self._background.wait()
        self._threads.shutdown()

    def _next(self) -> PendingResults | None:
        arena = self._store.arena
        pressed = self._hurry or (arena is not None and arena.used_bytes * _KEEP_SHARE > arena.nbytes)
        oldest = min(filter(None, map(self._oldest, self._queues())), key=lambda each: each[1], default=None)
        if oldest is not None:
            pending, due = oldest
            left_s = due - time.monotonic()
            if pressed or left_s <= 0:
                return pending
            self._look_again(left_s)
            return None
        hidden = (each for each in self._hidden if not (self._copying_long and _is_long(each)))
        return next(hidden, None) if pressed else None

    def _queues(self) -> Iterator[OrderedDict[PendingResults, float]]:
        """Yield the results of which one may be copied now."""
        yield self._waiting
        if not self._copying_long:
            yield self._long

    def _queue_of(self, pending: PendingResults) -> OrderedDict[PendingResults, float]:
        return self._long if _is_long(pending) else self._waiting

    def _oldest(self, waiting: OrderedDict[PendingResults, float]) -> tuple[PendingResults, float] | None:
        """Return the first of them that somebody can see, and when it is due."""
        while waiting:
            pending, due = next(iter(waiting.items()))
            if not all(record.hidden for record in pending.records):
                return pending, due
            del waiting[pending]
            self._hidden[pending] = None
        return None

    def _look_again(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.look)

    async def _copy(self, pending: PendingResults) -> None:
        """Copy results once; what fails lets others pass, and is tried again."""
        try:
            await self._attempt(pending)
        except (StoreFull, TierUnavailable, OSError) as error:
            self._try_later(pending, error)
        finally:
            self._copying -= 1
            self._copying_long &= not _is_long(pending)
            self.look()

    def _try_later(self, pending: PendingResults, error: Exception) -> None:
        if pending.state is not State.HOST or self._stopping.is_set():
            return
        delay_s = self._delays.get(pending, _MIN_RETRY_S)
        self._delays[pending] = min(2 * delay_s, _MAX_RETRY_S)
        log.warning("job %s: its results stay in memory, for they cannot be written (%s)", pending.job, error)
        self._failing[pending] = asyncio.get_running_loop().call_later(delay_s, self._try_again, pending)

    def _try_again(self, pending: PendingResults) -> None:
        del self._failing[pending]
        waiting = self._queue_of(pending)
        waiting[pending] = 0.0
        waiting.move_to_end(pending, last=False)
        self.look()

    async def _attempt(self, pending: PendingResults) -> None:
        """Bring results to files, unless they are deleted meanwhile. Raises StoreFull, OSError."""
        for record in tuple(pending.records):
            await self._store.stock(record.info.nbytes)
        if pending.state is not State.HOST:
            return
        records = [record for record in pending.records if record.extent is not None]
        places: list[Extent] = []
        written, reusable = False, True
        try:
            places.extend(self._store.place(record.info.nbytes) for record in records)  # as many as there is room for
            views = [record.extent.view(record.info.nbytes) for record in records if record.extent is not None]

            def wanted() -> bool:
                return pending.state is State.HOST and not self._stopping.is_set()

            loop = asyncio.get_running_loop()
            secure = self._store.secures
            work = loop.run_in_executor(self._threads, _write, views, places, wanted, secure)
            del views  # the thread's alone: the block is nobody's when it has ended
            try:
                written = await work and pending.state is State.HOST
                if written:
                    arena = [record.extent.view(record.info.nbytes) for record in records if record.extent is not None]
                    await self._store.replicate(records, arena)
                    del arena
                    written = pending.state is State.HOST
            except BaseException:
                reusable = False  # the disk fails there; or this was cancelled, and the thread may write on
                raise
        finally:
            if not written:
                for record, place in zip(records, places, strict=False):
                    self._store.displace(place, record.info.nbytes, reusable=reusable)
        if written:
            for record, place in zip(records, places, strict=True):
                self._store.move(record, place)
            self._delays.pop(pending, None)
            self._spilled(pending)


def _is_long(pending: PendingResults) -> bool:
    return pending.nbytes > _LONG


def _write(
    views: Sequence[memoryview], places: Sequence[Extent], wanted: Callable[[], bool], secure: bool = False
) -> bool:
    """Copy each view to its file, in a thread of its own; False: it was no longer wanted. Raises OSError.

    `secure`: wait until the disk has it, as long as the bytes are elsewhere, too; of a long one now and then, so that
    what is no longer wanted waits for as much at most.
    """
    for view, place in zip(views, places, strict=True):
        fd = os.open(place.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            done = flushed = 0
            while done < len(view):
                if not wanted():
                    return False
                done += os.pwrite(fd, view[done : done + _STEP], place.start + done)
                if secure and done - flushed >= _FLUSH and done < len(view):
                    place.flush()
                    flushed = done
            if secure:
                place.flush()  # with the file open, whose errors the system may forget otherwise
        finally:
            os.close(fd)
    return True
