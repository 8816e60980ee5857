"""Durable jobs as long as they are in memory: what each holds until its end, and who waits for its changes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from gemmserve_service.errors import NotFound
from gemmserve_service.jobs.forms.form import Ended, Fresh, whole
from gemmserve_service.jobs.job_queue import brief
from gemmserve_service.runtime.tracing.spans import link_job
from gemmserve_service.schemas import JobInfo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from gemmserve_service.errors import ServiceError
    from gemmserve_service.executor.protocol import Done
    from gemmserve_service.jobs.job_queue import JobQueue
    from gemmserve_service.jobs.observers import Observer
    from gemmserve_service.jobs.one_shot import EndedJob
    from gemmserve_service.runtime.tracing.spans import ProductTrace
    from gemmserve_service.scheduling.tasks import Task
    from gemmserve_service.schemas import JobState
    from gemmserve_service.store.pin import Pinned

_MAX_RECENT: Final = 4096  # finished jobs
_SELDOM: Final = ("residual", "mismatch", "elements", "steps")
"""Fields of an end that small products do not have."""


@dataclass(eq=False, slots=True)
class LiveJob:
    """A durable job that is not final, or was not when somebody began to watch it.

    `_changes` are its states, the first of them whole or fresh, the last whole or ended; of others the fields that
    changed, until somebody asks.
    """

    _changes: list[JobInfo | Fresh | Ended | dict[str, Any]]
    task: Task | None
    give_steps: Callable[[], None]
    """Called at its end: a program's steps count no more among those that wait."""
    progress: float = 0.0
    """Share of it that is done, as those who watch it were told last."""
    watched: bool = False
    """Whether anybody has waited for its changes."""
    ending: bool = False
    """Whether its end is being recorded."""
    given_up: bool = False
    """Whether the server stops before its end could be recorded."""
    entered: bool = True
    """Whether its record is on its way to the disk, or there."""
    early: tuple[Done | ServiceError, Sequence[Pinned]] | None = None
    """Its end, where that came before: the outcome, and pins to be released then."""
    refused: Exception | None = None
    """Reason that the job itself could not be put on record: nobody was told that it was accepted."""
    trace: ProductTrace | None = None
    """Its trace, where the request that submitted it is traced."""
    _watchers: asyncio.Event | None = None
    _told: dict[Callable[[], object], None] = field(default_factory=dict)
    """Callbacks of those who wait for a change and have no coroutine, in the order in which they came."""
    first: JobInfo | Fresh = field(init=False)
    """The job as it was at first."""
    op: str = field(init=False)
    """Operation of the job; its task's may be another."""

    def __post_init__(self) -> None:
        first = self._changes[0]
        assert not isinstance(first, dict | Ended)
        self.first, self.op = first, first.op

    @property
    def history(self) -> list[JobInfo]:
        """Its states so far."""
        states: list[JobInfo] = []
        for change in self._changes:
            if isinstance(change, dict):
                states.append(states[-1].model_copy(update=change))
            else:
                states.append(change if isinstance(change, JobInfo) else change.info())
        self._changes[:] = states
        return states

    @property
    def begun(self) -> tuple[Fresh, dict[str, Any]] | None:
        """The job as it was at first, if it was fresh, and what has changed once, if anything. None: more has."""
        first, change = self._changes[0], self._changes[-1]
        if not isinstance(first, Fresh) or len(self._changes) > 2:
            return None
        if change is first:
            return first, {}
        return (first, change) if isinstance(change, dict) else None

    @property
    def info(self) -> JobInfo:
        """The job now."""
        last = self._changes[-1]
        return last if isinstance(last, JobInfo) else self.history[-1]

    @property
    def shown(self) -> JobInfo | Ended:
        """The job now, as an answer needs it."""
        last = self._changes[-1]
        return last if isinstance(last, Ended) else self.info

    @property
    def over(self) -> bool:
        """Whether its state is final."""
        last = self._changes[-1]
        return isinstance(last, JobInfo | Ended) and last.state.final

    def succeeded_by(self, fields: dict[str, Any]) -> JobInfo | Ended:
        """`changed_by` of the fields of an end, which is a success."""
        begun = self.begun
        if begun is None or "attempt" not in begun[1] or any(fields[name] is not None for name in _SELDOM):
            return self.changed_by(fields)
        first, change = begun
        return Ended(
            first, change["attempt"], change["started_at"], fields["finished_at"], fields["result"], fields["timings"],
            fields["algorithm"],
        )  # fmt: skip

    def changed_by(self, fields: dict[str, Any]) -> JobInfo:
        """Return the job as it would be after a change of those fields."""
        for state in reversed(self._changes):
            if isinstance(state, Fresh):
                return state.info(fields)
            if isinstance(state, JobInfo):
                return state.model_copy(update=fields)
            fields = {**state, **fields}
        raise AssertionError("the first state is whole")

    @property
    def size(self) -> tuple[int, int]:
        """Bytes and operations of its problem, once that is known."""
        return (0, 0) if self.task is None else self.task.size

    def change(self, change: JobInfo | Ended | dict[str, Any]) -> None:
        """Set the job's info, or fields of it, and wake its watchers."""
        self._changes.append(change)
        self.wake()

    def wake(self) -> None:
        """Wake whoever waits for a change."""
        if self._watchers is not None:
            self._watchers.set()
            self._watchers = None
        if self._told:
            told, self._told = self._told, {}
            for callback in told:
                callback()

    def on_change(self, callback: Callable[[], object]) -> None:
        """Call `callback()` at the next change."""
        self._told[callback] = None

    def no_longer(self, callback: Callable[[], object]) -> None:
        """Call `callback()` at no change any more."""
        self._told.pop(callback, None)

    async def changed(self) -> None:
        """Wait for the next change."""
        if self._watchers is None:
            self._watchers = asyncio.Event()
        await self._watchers.wait()


class _Wait:
    """Wait of somebody without a coroutine for the end of a job. No closures, which would hold each other, and all that
    the job had, until the garbage collector comes.
    """

    __slots__ = ("_jobs", "_live", "_over", "_timeout_s", "_timer", "_told")

    def __init__(self, jobs: LiveJobs, live: LiveJob, timeout_s: float, told: Callable[[], object]) -> None:
        self._jobs = jobs
        self._live = live
        self._timeout_s = timeout_s
        self._told = told
        self._over = False
        self._timer: asyncio.TimerHandle | None = None
        self._look()
        # Not before those who are told in this turn: most jobs are over then.
        asyncio.get_running_loop().call_soon(self._wind)

    def _look(self) -> None:
        if self._over:
            return
        if self._jobs.waits_for(self._live):
            self._live.on_change(self._look)
            return
        if self._timer is not None:
            self._timer.cancel()
        self._end()

    def _wind(self) -> None:
        if not self._over:
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._end)

    def _end(self) -> None:
        self._over = True
        # Both hold the request, of which there may be many before the job changes.
        self._timer = None
        self._live.no_longer(self._look)
        self._told()


class LiveJobs:
    """The durable jobs that are not final, and those that ended last; others are in the database."""

    def __init__(self, queue: JobQueue, observers: list[Observer]) -> None:
        self.queue = queue
        self.observers = observers
        self._live: dict[str, LiveJob] = {}
        self._recent: OrderedDict[str, JobInfo | Ended] = OrderedDict()
        self._released = asyncio.Event()

    # `owner`: who asks. Another's job is not found; "" sees everybody's.

    async def get(self, job_id: str, *, owner: str = "") -> JobInfo:
        """The job now. Raises NotFound."""
        live = self._live.get(job_id)
        known = self._recent.get(job_id) if live is None else live.info
        info = await self.queue.get(job_id) if known is None else whole(known)
        if info is None or (owner and info.owner != owner):
            raise NotFound(f"no job {job_id}")
        if info.trace:
            link_job(info.trace)
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
        live = self._live.get(job_id)
        if live is None or (owner and live.first.owner != owner):
            return await self.get(job_id, owner=owner)
        await self._wait(live, timeout_s)
        return await self.get(job_id)

    async def wait_until_over(self, job_id: str, timeout_s: float, *, owner: str = "") -> None:
        """Return when `wait` would; at once for a job that there is not."""
        live = self._live.get(job_id)
        if live is not None and owner in {"", live.first.owner}:
            await self._wait(live, timeout_s)

    async def _wait(self, live: LiveJob, timeout_s: float) -> None:
        """Return when `wait` would."""
        if self._watch(live.first.id) is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while self.waits_for(live):
                        await live.changed()

    def when_over(self, live: LiveJob, timeout_s: float, told: Callable[[], object]) -> None:
        """Call `told()` once, when `wait` would return: for those who need no coroutine for anything else."""
        if self._watch(live.first.id) is None:
            told()
        else:
            _Wait(self, live, timeout_s, told)

    def waits_for(self, live: LiveJob) -> bool:
        """Whether somebody who waits for a job is to wait on."""
        return live.first.id in self._live and not self._released.is_set()

    def in_memory(self, job_id: str, owner: str) -> LiveJob | JobInfo | Ended | None:
        """Return a job that this owner sees, where it is in memory whole: programs may not be."""
        live = self._live.get(job_id)
        if live is not None:
            return live if live.op != "program" and owner in {"", live.first.owner} else None
        info = self._recent.get(job_id)
        return info if info is not None and owner in {"", info.owner} else None

    def _watch(self, job_id: str) -> LiveJob | None:
        """The job, if it is not final; its end is recorded as soon as it can be from now on."""
        live = self._live.get(job_id)
        if live is not None:
            live.watched = True
            if live.ending:
                self.queue.begin()
        return live

    async def wait_all(self, lives: Sequence[LiveJob], timeout_s: float) -> None:
        """Return when all of the jobs are final, or after `timeout_s`. Raises NotFound.

        The last one is waited for first: by its end those before it have ended, too, as a rule, and their ends go on
        record many at a time.
        """
        until = time.monotonic() + timeout_s
        for live in reversed(lives):
            if not live.over:
                await self._wait(live, max(until - time.monotonic(), 0.0))
            if live.refused is not None:
                raise NotFound(f"no job {live.first.id}")

    async def events(self, job_id: str, *, owner: str = "") -> AsyncIterator[JobInfo]:
        """The job now and after each change; ends after a final state, or when the server drains. Raises NotFound."""
        await self.get(job_id, owner=owner)
        live = self._watch(job_id)
        if live is None:
            yield await self.get(job_id)
            return
        seen = len(live.history) - 1
        while True:
            while seen < len(history := live.history):  # which grows while somebody takes one
                seen += 1
                yield history[seen - 1]
            if live.info.state.final or self._released.is_set():
                return
            await live.changed()

    def release_waiters(self) -> None:
        """Answers everyone who waits with the state as it is."""
        self._released.set()
        for live in self._live.values():
            live.wake()

    def _forget(self, live: LiveJob, info: JobInfo | Ended) -> None:
        """Release what a job that is over holds, and wake its watchers."""
        del self._live[info.id]
        live.give_steps()
        live.change(info)
        if live.trace is not None:
            live.trace.end(info.state.value)
        self._observe(info, live.size)

    def _entered(self, job_id: str, live: LiveJob, state: JobState) -> None:
        for observer in self.observers:
            observer.job_entered(job_id, live.op, state)

    def _observe(self, info: JobInfo | Ended | EndedJob, size: tuple[int, int]) -> None:
        for observer in self.observers:
            observer.job_ended(info, *size)

    def _remember(self, info: JobInfo | Ended) -> None:
        """Keep a finished job, so that whoever waits for it needs no database."""
        self._recent[info.id] = info
        if len(self._recent) > _MAX_RECENT:
            self._recent.popitem(last=False)
