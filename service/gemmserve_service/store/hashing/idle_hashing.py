"""Digests of stored arrays, worked out one after another while no body comes in fast: hashing never slows the socket.

An array that is deleted before its turn is not hashed at all, and its extent is free at once for the next one.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from gemmserve_service.runtime.background import report

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_service.store.hashing.running_hash import RunningHash

_FAST: Final = 4 << 20  # bytes that came without a pause; of a slower client they come in smaller pieces
_LULL_S: Final = 0.05  # without such bytes, after which the processor is taken
_LONGEST_WAIT_S: Final = 0.25  # then a slice is hashed all the same: some 16 MiB/s while bodies never cease
_LEAST: Final = 1 << 14  # bytes that an array counts for at least, however few it has
_SLICE: Final = 4 << 20  # bytes; of small arrays so many that they make one


class LazyHashes:
    """The arrays whose digest is wanted, and nobody waits for. Belongs to the event loop's thread."""

    def __init__(self, found: Callable[[str, RunningHash], object]) -> None:
        """`found(array_id, running)`: that one is over."""
        self._found = found
        self._waiting: dict[str, RunningHash] = {}
        self._task: asyncio.Task[None] | None = None
        self._moved_at = -_LULL_S

    def add(self, array_id: str, running: RunningHash) -> None:
        """Has the rest of `running` worked out in its turn."""
        if running.over:  # a digest was sent, and checked
            self._found(array_id, running)
            return
        self._waiting[array_id] = running
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(report)

    def drop(self, array_id: str) -> None:
        """Nobody wants it any more."""
        running = self._waiting.pop(array_id, None)
        if running is not None:
            running.cancel()

    def moved(self, count: int) -> None:
        """So many bytes of a body came at once."""
        if count >= _FAST:
            self._moved_at = time.monotonic()

    @property
    def busy(self) -> bool:
        """Whether bodies come in that hashing would slow down. From any thread."""
        return time.monotonic() - self._moved_at < _LULL_S

    async def stop(self) -> None:
        """Gives up what is not done."""
        for running in self._waiting.values():
            running.cancel()
        self._waiting.clear()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        hashed = _SLICE
        while self._waiting:
            if hashed >= _SLICE:
                hashed = 0
                await self._lull()
                if not self._waiting:  # all were dropped meanwhile
                    return
            array_id, running = next(iter(self._waiting.items()))
            before = running.done
            if not running.over:
                await running.work(lambda: self.busy)
            hashed += max(running.done - before, _LEAST)
            if running.over and self._waiting.pop(array_id, None) is running:
                self._found(array_id, running)
            del running  # holds a view of the extent

    async def _lull(self) -> None:
        """Waits until no body comes in, though not for long."""
        end = time.monotonic() + _LONGEST_WAIT_S
        while self.busy and time.monotonic() < end:  # noqa: ASYNC110 (what ends is a silence)
            await asyncio.sleep(_LULL_S)
