"""Durable jobs as long as they are in memory: what each holds until its end, and who waits for its changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from gemmserve_service.errors import NotFound
from gemmserve_service.jobs.job_queue import brief

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gemmserve_service.jobs.job_queue import JobQueue
    from gemmserve_service.jobs.observers import Observer
    from gemmserve_service.jobs.one_shot import EndedJob
    from gemmserve_service.scheduling.tasks import Task
    from gemmserve_service.schemas import JobInfo, JobState

_MAX_RECENT: Final = 4096  # finished jobs


@dataclass(eq=False)
class LiveJob:
    """A durable job that is not final, or was not when somebody began to watch it."""

    history: list[JobInfo]
    held: contextlib.ExitStack
    """Resources that are given back at its end."""
    task: Task | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    recorded: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its end is on record. Not `changed`: that one stays set when the server drains."""
    refused: Exception | None = None
    """Reason that the job itself could not be put on record: nobody was told that it was accepted."""

    @property
    def info(self) -> JobInfo:
        """The job now."""
        return self.history[-1]

    @property
    def size(self) -> tuple[int, int]:
        """Bytes and operations of its problem, once that is known."""
        return (0, 0) if self.task is None else self.task.size

    def change(self, info: JobInfo) -> None:
        """Set the job's info, and wake its watchers."""
        self.history.append(info)
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


class LiveJobs:
    """The durable jobs that are not final, and those that ended last; others are in the database."""

    def __init__(self, queue: JobQueue, observers: list[Observer]) -> None:
        self.queue = queue
        self.observers = observers
        self._live: dict[str, LiveJob] = {}
        self._recent: OrderedDict[str, JobInfo] = OrderedDict()
        self._released = asyncio.Event()

    # `owner`: who asks. Another's job is not found; "" sees everybody's.

    async def get(self, job_id: str, *, owner: str = "") -> JobInfo:
        """The job now. Raises NotFound."""
        live = self._live.get(job_id)
        info = self._recent.get(job_id) if live is None else live.info
        if info is None:
            info = await self.queue.get(job_id)
        if info is None or (owner and info.owner != owner):
            raise NotFound(f"no job {job_id}")
        return info

    async def list(
        self, *, state: JobState | None, limit: int, cursor: str | None, owner: str = ""
    ) -> tuple[list[JobInfo], str | None]:
        """A page, newest first, and the cursor of the next one. Programs come without their steps."""
        page = await self.queue.page(state=state, limit=limit + 1, before=cursor, owner=owner)
        more = len(page) > limit
        items = [brief(self._live[info.id].info) if info.id in self._live else info for info in page[:limit]]
        return items, (page[limit - 1].id if more else None)

    async def wait(self, job_id: str, timeout_s: float, *, owner: str = "") -> JobInfo:
        """The job once it is final, or as it is after `timeout_s` or when the server drains. Raises NotFound."""
        await self.get(job_id, owner=owner)
        live = self._live.get(job_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while live is not None and job_id in self._live and not self._released.is_set():
                    await live.changed.wait()
        return await self.get(job_id)

    async def events(self, job_id: str, *, owner: str = "") -> AsyncIterator[JobInfo]:
        """The job now and after each change; ends after a final state, or when the server drains. Raises NotFound."""
        await self.get(job_id, owner=owner)
        live = self._live.get(job_id)
        if live is None:
            yield await self.get(job_id)
            return
        seen = len(live.history) - 1
        while True:
            while seen < len(live.history):
                yield live.history[seen]
                seen += 1
            if live.info.state.final or self._released.is_set():
                return
            await live.changed.wait()

    def release_waiters(self) -> None:
        """Answers everyone who waits with the state as it is."""
        self._released.set()
        for live in self._live.values():
            live.changed.set()

    def _forget(self, live: LiveJob, info: JobInfo) -> None:
        """Release what a job that is over holds, and wake its watchers."""
        del self._live[info.id]
        live.held.close()
        live.recorded.set()
        self._change(live, info)

    def _change(self, live: LiveJob, info: JobInfo) -> None:
        live.change(info)
        self._observe(info, live.size)

    def _observe(self, info: JobInfo | EndedJob, size: tuple[int, int]) -> None:
        for observer in self.observers:
            observer.job_changed(info, *size)

    def _remember(self, info: JobInfo) -> None:
        """Keep a finished job, so that whoever waits for it needs no database."""
        self._recent[info.id] = info
        if len(self._recent) > _MAX_RECENT:
            self._recent.popitem(last=False)
