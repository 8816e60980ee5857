"""Work that nobody awaits: what goes wrong with it is in the log at least."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine

log = logging.getLogger(__name__)


def report(done: asyncio.Future[Any]) -> None:
    """A callback for what has ended."""
    if not done.cancelled() and done.exception() is not None:
        log.error("background work failed", exc_info=done.exception())


class Background:
    """Tasks of an event loop that somebody starts and waits for at the end only."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts it."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(report)
        return task

    async def stop(self) -> None:
        """Cancels all that was started; returns when it has ended."""
        for task in self._tasks:
            task.cancel()
        await self.wait()

    async def wait(self) -> None:
        """Wait until all that was started has ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
