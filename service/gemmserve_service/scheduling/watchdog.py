"""Workers that hang: silent ones, those whose task does not get on, those that do not write or copy what somebody waits
for. They are killed; the task is tried again.

A task's lease is `hang_s` and `hang_factor` times its estimated time; each panel that its worker reports renews it. One
that nobody wants any more has `silence_s` in the place of `hang_s`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gemmserve_service.executor.port import Executor, Worker
    from gemmserve_service.scheduling.tasks import Task

_LOOKS: Final = 10  # in the shortest time that it watches for
_MAX_INTERVAL_S: Final = 1.0
_PATIENCE_S: Final = 5.0  # beyond its estimated time, after which a task that does not get on is spoken of

log = logging.getLogger(__name__)


class Watchdog:
    """Watch over the workers every second, or more often where settings ask for shorter times."""

    def __init__(self, executor: Executor, *, silence_s: float, hang_s: float) -> None:
        self.executor = executor
        self.silence_s = silence_s
        self.hang_s = hang_s
        self.killed = 0
        """Workers that were killed."""
        self._every_s = min(silence_s / _LOOKS, hang_s / _LOOKS, _MAX_INTERVAL_S)
        self._excused = 0.0
        self._last_look: float | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to look."""
        self._task = asyncio.get_running_loop().create_task(self._watch(), name="watchdog")

    async def stop(self) -> None:
        """Stop watching."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def look(self, now: float) -> None:
        """Kills every worker that hangs; `now` by time.monotonic."""
        if self._last_look is not None and now - self._last_look > self.silence_s / 2:
            # This process was stopped itself, or the machine slept: the workers could not be heard.
            log.warning("nobody watched the workers for %.1f s", now - self._last_look)
            self._excused = now
        self._last_look = now
        for worker in list(self.executor.workers()):
            if worker.ready and (reason := self._hung(worker, now)):
                self.killed += 1
                self.executor.kill(worker, reason)

    def stalled(self, worker: Worker) -> str | None:
        """Return that a worker has not got on with its task for seconds; None: it has, or has none."""
        task: Task | None = next(iter(worker.tasks.values()), None)
        still_s = time.monotonic() - max(worker.moved, self._excused)
        if task is None or still_s <= _PATIENCE_S + task.expected_s:
            return None
        return f"worker {worker.id} has not got on for {still_s:.0f} s"

    def _hung(self, worker: Worker, now: float) -> str | None:
        silent_s = now - max(worker.heard, self._excused)
        if silent_s > self.silence_s:
            return f"no sign of life for {silent_s:.1f} s"
        task: Task | None = next(iter(worker.tasks.values()), None)
        if task is not None:
            still_s = now - max(worker.moved, self._excused)
            limit_s = task.limit_s
            if task.over:  # it was told to stop
                limit_s += min(self.silence_s - self.hang_s, 0.0)
            if still_s > limit_s:
                worker.tasks.get(worker.at or "", task).stalled = True
                return f"task {task.id} has not got on for {still_s:.1f} s"
        if worker.asked is not None:
            waited_s = now - max(worker.asked, self._excused)
            if waited_s > self.hang_s:
                return f"a result that somebody waits for was not written in {waited_s:.1f} s"
        if worker.delivering is not None:
            waited_s = now - max(worker.delivering, self._excused)
            if waited_s > self.hang_s:
                return f"an array that somebody waits for was not copied in {waited_s:.1f} s"
        return None

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                self.look(time.monotonic())
            except Exception:  # of one worker: the others hang no less
                log.exception("a worker that hangs could not be ended")
