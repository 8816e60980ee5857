"""Jobs as their owners see them: submitted, awaited, cancelled; durable ones and those of a single request.

States: queued -> running -> succeeded | failed | cancelled | expired, and running -> queued when a worker is lost. A
job is on record before its submission is answered, and its results before it is called succeeded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gemmserve_service import clock
from gemmserve_service.background import report
from gemmserve_service.catalog import to_row
from gemmserve_service.errors import JobFailed, NotFound, ServiceError, describe
from gemmserve_service.executor.protocol import Done
from gemmserve_service.idempotency import IdempotencyKeys, RememberedKey, digest_of
from gemmserve_service.ids import new_id
from gemmserve_service.lineages import recover
from gemmserve_service.preparing import prepare
from gemmserve_service.purging import purge
from gemmserve_service.queue import brief
from gemmserve_service.recording import Recorder
from gemmserve_service.schemas import GemmParams, GemmReduceParams, JobInfo, JobState, ProgramJob
from gemmserve_service.single import OneShot, final_fields, run_once
from gemmserve_service.step_room import StepRoom, steps_of
from gemmserve_service.uploads import now

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from gemmserve_kernels.errors import KernelError
    from gemmserve_service.observers import Observer
    from gemmserve_service.operations import Problem
    from gemmserve_service.pins import Pinned
    from gemmserve_service.queue import JobQueue, Unfinished
    from gemmserve_service.scheduler import Scheduler
    from gemmserve_service.schemas import GemmJob, GemmReduceJob
    from gemmserve_service.settings import Settings
    from gemmserve_service.single import EndedJob
    from gemmserve_service.store import ArrayStore
    from gemmserve_service.tasks import Task
    from gemmserve_service.unwritten import Unwritten
    from gemmserve_service.uploads import Upload

_MOST_RECENT: Final = 4096  # finished jobs kept in memory, so that those who wait for them need no database

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Live:
    """A durable job that is not final, or was not when somebody began to watch it."""

    history: list[JobInfo]
    held: contextlib.ExitStack
    """What is given back at its end."""
    changed: asyncio.Event
    task: Task | None = None
    recorded: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when its end is on record. Not `changed`: that one stays set when the server drains."""

    @property
    def info(self) -> JobInfo:
        """The job now."""
        return self.history[-1]


class Jobs:
    """Listens to the scheduler (`scheduler.Listener`) for durable jobs; belongs to the event loop's thread."""

    def __init__(
        self,
        settings: Settings,
        store: ArrayStore,
        queue: JobQueue,
        scheduler: Scheduler,
        observers: list[Observer],
    ) -> None:
        self.settings = settings
        self.store = store
        self.queue = queue
        self.scheduler = scheduler
        self.observers = observers
        self._live: dict[str, _Live] = {}
        self._recent: OrderedDict[str, JobInfo] = OrderedDict()
        self._keys = IdempotencyKeys(settings.idempotency_ttl_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self._released = asyncio.Event()
        self._room = StepRoom(settings.max_queued_steps)
        self.recorder = Recorder(store, queue)
        scheduler.writes.on_lost = self._lost
        self._prepare = partial(prepare, store=store, scheduler=scheduler, listener=self)

    # -- life cycle -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Takes up what an earlier process left."""
        unfinished, keys = await self.queue.recover()
        self._keys.load(keys)
        for job in unfinished:
            await self._resume(job)
        if unfinished:
            log.info("recovery: %d unfinished jobs are queued again", len(unfinished))
        await recover(self.store, self.queue, self.scheduler)
        self.store.expiry.on_jump.append(self._follow_clock)
        self.store.finish_recovery()
        self._spawn(purge(self.settings, self.queue, self._keys))

    async def stop(self) -> None:
        """Ends background work; writes under way are finished first."""
        self.recorder.stop()
        purge = [task for task in self._tasks if task.get_name() == "purge"]
        for task in purge:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def release_waiters(self) -> None:
        """Answers everyone who waits with the state as it is."""
        self._released.set()
        for live in self._live.values():
            live.changed.set()

    # -- durable jobs -----------------------------------------------------------------------------------------------

    async def submit(
        self, request: GemmJob | GemmReduceJob | ProgramJob, *, idempotency_key: str | None = None, owner: str = ""
    ) -> tuple[JobInfo, bool]:
        """Queues a product of stored arrays, or a program; on record when this returns. False: the key had made this
        job before.

        `owner`: whose job it is and whose operands it may use ("": everybody's, where the server has no API keys).
        Raises KernelError, NotFound, Gone, TooLarge, StoreFull, QueueFull, NotReady, Draining, IdempotencyConflict,
        IdempotencyMismatch.
        """
        arrived = time.monotonic()
        # Of a program what was left out stays out: a thousand steps would be many times as long.
        text = request.model_dump_json(exclude_unset=isinstance(request, ProgramJob))
        if idempotency_key is None:
            with self.scheduler.admission(owner) as claim:
                return await self._submit(request, text, None, owner, arrived, claim), True
        digest = digest_of(text)
        known = self._keys.job_of(owner, idempotency_key, digest)
        if known is not None:
            return await self.get(known), False
        with self._keys.arriving(owner, idempotency_key, digest), self.scheduler.admission(owner) as claim:
            return await self._submit(request, text, (idempotency_key, digest), owner, arrived, claim), True

    async def _submit(
        self,
        request: GemmJob | GemmReduceJob | ProgramJob,
        text: str,
        key: tuple[str, str] | None,
        owner: str,
        arrived: float,
        claim: Callable[[Problem], None],
    ) -> JobInfo:
        job_id = new_id("job")
        created = now()
        with contextlib.ExitStack() as held:
            retry_after_s = self.scheduler.admissions.retry_after_s()
            held.callback(self._room.take(owner, steps_of(request), retry_after_s=retry_after_s))
            task = await self._prepare(job_id, request, owner, claim=claim)
            task.submitted = arrived
            info = JobInfo(
                id=job_id,
                state=JobState.QUEUED,
                op=request.op,
                created_at=created,
                request=request.model_dump(mode="json", exclude_unset=isinstance(request, ProgramJob)),
                owner=owner,
            )
            deadline_at = None if request.timeout_s is None else created.timestamp() + request.timeout_s
            remembered = None if key is None else RememberedKey(owner, *key, job_id, created.timestamp())
            try:
                await self.queue.insert(info, text, deadline_at, remembered)
            except asyncio.CancelledError:
                # The client hung up, the row may be committed all the same: a job on record is carried out.
                self._admit(info, task, remembered, held.pop_all())
                raise
            except BaseException:
                task.close()
                raise
            return self._admit(info, task, remembered, held.pop_all()).info

    def _admit(self, info: JobInfo, task: Task, key: RememberedKey | None, held: contextlib.ExitStack) -> _Live:
        if key is not None:
            self._keys.remember(key)
        live = self._live[info.id] = _Live([info], held, asyncio.Event(), task)
        self._observe(info, task.size)
        self.scheduler.submit(task)
        return live

    async def _resume(self, job: Unfinished) -> None:
        info = job.info.model_copy(update={"state": JobState.QUEUED, "started_at": None})
        live = _Live([info], contextlib.ExitStack(), asyncio.Event())
        live.held.callback(self._room.take(info.owner, steps_of(job.request), recovered=True))
        self._live[info.id] = live
        try:
            task = await self._prepare(info.id, job.request, info.owner, claim=None)
        except (ServiceError, ValueError) as error:  # KernelError is a ValueError
            self._spawn(self._conclude(live, _failed(error), None, []))
            return
        task.attempt, task.crashes = info.attempt, job.crashes
        live.task = task
        if job.deadline_at is not None:
            task.timeout_s = max(job.deadline_at - clock.time(), 0.0)
        self.scheduler.submit(task)

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

    async def cancel(self, job_id: str, *, owner: str = "") -> JobInfo:
        """Cancels a job that is not final; returns it as it is then. Raises NotFound."""
        await self.get(job_id, owner=owner)
        live = self._live.get(job_id)
        if live is not None and live.task is not None:
            self.scheduler.cancel(live.task)
            await live.recorded.wait()
        return await self.get(job_id)

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
        told = len(live.history) - 1
        while True:
            while told < len(live.history):
                yield live.history[told]
                told += 1
            if live.info.state.final or self._released.is_set():
                return
            await live.changed.wait()

    # -- scheduler.Listener -----------------------------------------------------------------------------------------

    def started(self, task: Task) -> None:
        """A worker has it."""
        live = self._live[task.id]
        update = {"state": JobState.RUNNING, "attempt": task.attempt, "started_at": now()}
        self._change(live, live.info.model_copy(update=update), task.size)
        self.queue.started(live.info).add_done_callback(report)

    def requeued(self, task: Task) -> None:
        """Its worker was lost."""
        live = self._live[task.id]
        self._change(live, live.info.model_copy(update={"state": JobState.QUEUED, "started_at": None}), task.size)
        self.queue.requeued(live.info, task.crashes).add_done_callback(report)

    def ended(self, task: Task, outcome: Done | ServiceError) -> None:
        """It is over; the rest is putting that on record."""
        # Its operands stay until then, whatever the scheduler does: were they freed now, a crash before the record
        # would start the job again on what came to lie in their place.
        held = [pinned.share() for pinned in task.operands.values()]
        self._spawn(self._conclude(self._live[task.id], outcome, task, held))

    async def _conclude(
        self, live: _Live, outcome: Done | ServiceError, task: Task | None, held: Sequence[Pinned]
    ) -> None:
        uploads = task.results if task is not None and isinstance(outcome, Done) else {}
        unwritten = task.unwritten if uploads and task is not None else None
        infos = {name: self.store.describe(upload) for name, upload in uploads.items()}
        info = live.info.model_copy(update=final_fields(outcome) | {"finished_at": now()})
        if isinstance(outcome, Done):
            info.result = {name: array.id for name, array in infos.items()}
        recorded = True
        try:
            job = None if unwritten is None else info.id
            rows = [to_row(infos[name], uploads[name].extent, job) for name in uploads]
            if not await self.recorder.record(info, list(uploads.values()) if unwritten is None else [], rows):
                live.recorded.set()
                return  # the server stops: the next one runs the job again
        except Exception as error:
            log.exception("job %s: its end cannot be recorded", info.id)
            recorded = False
            info = live.info.model_copy(update=final_fields(_failed(error)) | {"finished_at": now()})
            if unwritten is not None and task is not None:
                self.scheduler.writes.discard(task)
            for upload in uploads.values() if unwritten is None else ():
                upload.abort()
        else:
            records = []
            for name, upload in uploads.items():
                upload.seal()
                records.append(self.store.index(infos[name], upload.extent))
            if unwritten is not None:
                self.scheduler.writes.recorded(unwritten, records)
        if task is not None and isinstance(outcome, Done) and unwritten is None:
            task.unpin()
        for pinned in held:
            pinned.release()
        if info.op != "program" or not recorded:  # programs may be long: they are in the database
            self._recent[info.id] = info
        if len(self._recent) > _MOST_RECENT:
            self._recent.popitem(last=False)
        del self._live[info.id]
        live.held.close()
        live.recorded.set()
        self._change(live, info, (0, 0) if task is None else task.size)

    def _change(self, live: _Live, info: JobInfo, size: tuple[int, int]) -> None:
        live.history.append(info)
        changed, live.changed = live.changed, asyncio.Event()
        changed.set()
        self._observe(info, size)

    # -- jobs of a single request -----------------------------------------------------------------------------------

    async def run(
        self,
        params: GemmParams | GemmReduceParams,
        operands: dict[str, Upload],
        *,
        timeout_s: float | None = None,
        owner: str = "",
    ) -> OneShot:
        """Runs a product of uploads that are filled, through the same scheduler, without the database.

        The operands are taken over. Cancelling the caller's task cancels the job. Raises KernelError, BodyTooShort,
        StoreFull, QueueFull, NotReady, Draining, JobTimeout, JobFailed, WorkerCrashed.
        """
        return await run_once(
            params,
            operands,
            timeout_s=timeout_s,
            owner=owner,
            store=self.store,
            scheduler=self.scheduler,
            observe=self._observe,
        )

    # -- inside -----------------------------------------------------------------------------------------------------

    def _observe(self, info: JobInfo | EndedJob, size: tuple[int, int]) -> None:
        for observer in self.observers:
            observer.job_changed(info, *size)

    def _spawn(self, coroutine: Any) -> None:
        name = "purge" if coroutine.__name__ == "purge" else None
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(report)

    async def _follow_clock(self, seconds: float) -> None:
        self._keys.shift(seconds)
        await self.queue.shift(seconds)

    def _lost(self, unwritten: Unwritten) -> None:
        """The job has succeeded, and that was told; that its results are lost is said besides."""
        assert unwritten.error is not None
        error = describe(unwritten.error).problem()
        if unwritten.job in self._recent:
            self._recent[unwritten.job] = self._recent[unwritten.job].model_copy(update={"error": error})
        self._spawn(self.queue.set_error(unwritten.job, error))


def _failed(error: Exception | KernelError) -> ServiceError:
    return error if isinstance(error, ServiceError) else JobFailed(describe(error))
