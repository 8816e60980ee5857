"""Jobs as their owners see them: submitted, awaited, cancelled; durable ones and those of a single request.

States: queued -> running -> succeeded | failed | cancelled | expired, and running -> queued when a worker is lost. A
job is on record before its submission is answered, and its results before it is called succeeded. A worker may be at
it before that: if it cannot be put on record, what came of it is thrown away, and the submission is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from gemmserve_service.errors import ServiceError, describe
from gemmserve_service.executor.protocol import Done
from gemmserve_service.jobs.idempotency import IdempotencyKeys, RememberedKey, digest_of
from gemmserve_service.jobs.live_jobs import LiveJob, LiveJobs
from gemmserve_service.jobs.one_shot import OneShot, run_once
from gemmserve_service.jobs.prepare import failure, final_fields, prepare, steps_of
from gemmserve_service.jobs.recorder import Recorder
from gemmserve_service.jobs.recovery import recover
from gemmserve_service.jobs.retention import purge
from gemmserve_service.runtime import clock
from gemmserve_service.runtime.background import Background, report
from gemmserve_service.runtime.clock import now
from gemmserve_service.runtime.ids import new_id
from gemmserve_service.schemas import GemmParams, GemmReduceParams, JobInfo, JobState, ProgramJob
from gemmserve_service.store.catalog import to_row

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gemmserve_service.jobs.job_queue import JobQueue, Unfinished
    from gemmserve_service.jobs.observers import Observer
    from gemmserve_service.programs import Problem
    from gemmserve_service.scheduling.scheduler import Scheduler
    from gemmserve_service.scheduling.tasks import Task
    from gemmserve_service.schemas import GemmJob, GemmReduceJob
    from gemmserve_service.settings import Settings
    from gemmserve_service.store.array_store import ArrayStore
    from gemmserve_service.store.pending import PendingResults
    from gemmserve_service.store.pin import Pinned
    from gemmserve_service.store.upload import Upload

_WAITS_WITHIN_S: Final = 0.002
"""Seconds for which the record of a job whose end is waited for may wait for that end, so that one commit has both."""

log = logging.getLogger(__name__)


class Jobs(LiveJobs):
    """Listens to the scheduler (`scheduler.Listener`) for durable jobs; belongs to the event loop's thread."""

    def __init__(
        self,
        settings: Settings,
        store: ArrayStore,
        queue: JobQueue,
        scheduler: Scheduler,
        observers: list[Observer],
    ) -> None:
        super().__init__(queue, observers)
        self.settings = settings
        self.store = store
        self.scheduler = scheduler
        self._keys = IdempotencyKeys(settings.idempotency_ttl_s)
        self._background = Background()
        self._purge: asyncio.Task[None] | None = None
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
        self._purge = self._background.spawn(purge(self.settings, self.queue, self._keys))

    async def stop(self) -> None:
        """Ends background work; writes under way are finished first."""
        self.recorder.stop()
        if self._purge is not None:
            self._purge.cancel()
        await self._background.wait()

    # -- durable jobs -----------------------------------------------------------------------------------------------

    async def submit(
        self,
        request: GemmJob | GemmReduceJob | ProgramJob,
        *,
        idempotency_key: str | None = None,
        owner: str = "",
        waits: bool = False,
    ) -> tuple[JobInfo, bool]:
        """Queues a product of stored arrays, or a program; on record when this returns. False: the key had made this
        job before.

        `owner`: whose job it is and whose operands it may use ("": everybody's, where the server has no API keys).
        `waits`: the caller waits for its end, and is in no hurry to hear that it was accepted.
        Raises KernelError, NotFound, Gone, TooLarge, StoreFull, QueueFull, NotReady, Draining, IdempotencyConflict,
        IdempotencyMismatch.
        """
        arrived = time.monotonic()
        # Of a program what was left out stays out: a thousand steps would be many times as long.
        text = request.model_dump_json(exclude_unset=isinstance(request, ProgramJob))
        with contextlib.ExitStack() as arriving:
            key = None
            if idempotency_key is not None:
                digest = digest_of(text)
                known = self._keys.job_of(owner, idempotency_key, digest)
                if known is not None:
                    return await self.get(known), False
                arriving.enter_context(self._keys.arriving(owner, idempotency_key, digest))
                key = (idempotency_key, digest)
            with self.scheduler.admission(owner) as claim:
                live, insert = await self._submit(request, text, key, owner, arrived, claim, waits=waits)
            # A client that hangs up changes nothing: a job on record is carried out, and its key taken until then.
            taken = arriving.pop_all()
            insert.add_done_callback(lambda _: taken.close())
        await asyncio.shield(insert)
        return live.info, True

    async def _submit(
        self,
        request: GemmJob | GemmReduceJob | ProgramJob,
        text: str,
        key: tuple[str, str] | None,
        owner: str,
        arrived: float,
        claim: Callable[[Problem], None],
        *,
        waits: bool,
    ) -> tuple[LiveJob, asyncio.Future[Any]]:
        """The job, which a worker may have when this returns, and what is done once it is on record."""
        job_id = new_id("job")
        created = now()
        with contextlib.ExitStack() as held:
            held.callback(self.scheduler.admissions.take_steps(owner, steps_of(request)))
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
                # Before the scheduler has it: whatever is recorded of the job comes after it.
                within_s = _WAITS_WITHIN_S if waits else 0.0
                insert = self.queue.insert(info, text, deadline_at, remembered, within_s=within_s)
            except BaseException:
                task.close()
                raise
            live = self._live[job_id] = LiveJob([info], held.pop_all(), task)
        insert.add_done_callback(partial(self._inserted, live, remembered))
        self._observe(info, task.size)
        self.scheduler.submit(task)
        return live, insert

    def _inserted(self, live: LiveJob, key: RememberedKey | None, insert: asyncio.Future[Any]) -> None:
        """Called when the job's row is written, or cannot be: what is not on record was not accepted, and leaves
        nothing.
        """
        error = insert.exception()
        if error is None:
            if key is not None:
                self._keys.remember(key)
            return
        live.refused = error if isinstance(error, Exception) else RuntimeError(str(error))
        task = live.task
        if task is not None and not task.over:
            self.scheduler.cancel(task)
            end = final_fields(failure(live.refused)) | {"finished_at": now()}
            self._forget(live, live.info.model_copy(update=end))

    async def _resume(self, job: Unfinished) -> None:
        info = job.info.model_copy(update={"state": JobState.QUEUED, "started_at": None})
        live = LiveJob([info], contextlib.ExitStack())
        live.held.callback(self.scheduler.admissions.take_steps(info.owner, steps_of(job.request), recovered=True))
        self._live[info.id] = live
        try:
            task = await self._prepare(info.id, job.request, info.owner, claim=None)
        except (ServiceError, ValueError) as error:  # KernelError is a ValueError
            self._background.spawn(self._conclude(live, failure(error), None, []))
            return
        task.attempt, task.crashes = info.attempt, job.crashes
        live.task = task
        if job.deadline_at is not None:
            task.timeout_s = max(job.deadline_at - clock.time(), 0.0)
        self.scheduler.submit(task)

    async def cancel(self, job_id: str, *, owner: str = "") -> JobInfo:
        """Cancels a job that is not final; returns it as it is then. Raises NotFound."""
        await self.get(job_id, owner=owner)
        live = self._live.get(job_id)
        if live is not None and live.task is not None:
            self.scheduler.cancel(live.task)
            await live.recorded.wait()
        return await self.get(job_id)

    # -- scheduler.Listener -----------------------------------------------------------------------------------------

    def started(self, task: Task) -> None:
        """Called when a worker was sent the task."""
        live = self._live[task.id]
        update = {"state": JobState.RUNNING, "attempt": task.attempt, "started_at": now()}
        self._change(live, live.info.model_copy(update=update))
        self.queue.started(live.info).add_done_callback(report)

    def requeued(self, task: Task) -> None:
        """Called when the task's worker was lost, and it waits again."""
        live = self._live[task.id]
        self._change(live, live.info.model_copy(update={"state": JobState.QUEUED, "started_at": None}))
        self.queue.requeued(live.info, task.crashes).add_done_callback(report)

    def ended(self, task: Task, outcome: Done | ServiceError) -> None:
        """Called when the task is over: its end is put on record."""
        if self._live[task.id].refused is not None:
            return
        # The operands stay until then: were they freed before, a crash would start the job again on what came to lie in
        # their place. After success their pins are the job's or its pending results'; else the scheduler releases them.
        held = [] if isinstance(outcome, Done) else [pinned.share() for pinned in task.operands.values()]
        self._background.spawn(self._conclude(self._live[task.id], outcome, task, held))

    async def _conclude(
        self, live: LiveJob, outcome: Done | ServiceError, task: Task | None, held: Sequence[Pinned]
    ) -> None:
        uploads = task.results if task is not None and isinstance(outcome, Done) else {}
        pending = task.pending if uploads and task is not None else None
        infos = {name: self.store.describe(upload) for name, upload in uploads.items()}
        info = live.info.model_copy(update=final_fields(outcome) | {"finished_at": now()})
        if isinstance(outcome, Done):
            info.result = {name: array.id for name, array in infos.items()}
        recorded = True
        try:
            job = None if pending is None else info.id
            rows = [to_row(infos[name], uploads[name].extent, job) for name in uploads]
            to_secure = list(uploads.values()) if pending is None else []
            if not await self.recorder.record(info, to_secure, rows, lambda: live.refused is not None):
                live.recorded.set()
                return  # the server stops: the next one runs the job again
        except Exception as error:
            if live.refused is None:
                log.exception("job %s: its end cannot be recorded", info.id)
            recorded = False
            info = live.info.model_copy(update=final_fields(failure(error)) | {"finished_at": now()})
            if pending is not None and task is not None:
                self.scheduler.writes.abandon(task)
            for upload in uploads.values() if pending is None else ():
                upload.abort()
        else:
            records = []
            for name, upload in uploads.items():
                upload.seal()
                records.append(self.store.index(infos[name], upload.extent))
            if pending is not None:
                self.scheduler.writes.recorded(pending, records)
        if task is not None and isinstance(outcome, Done) and pending is None:
            task.unpin()
        for pinned in held:
            pinned.release()
        if (info.op != "program" or not recorded) and live.refused is None:  # long programs are in the database
            self._remember(info)
        self._forget(live, info)

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

    async def _follow_clock(self, seconds: float) -> None:
        self._keys.shift(seconds)
        await self.queue.shift(seconds)

    def _lost(self, pending: PendingResults) -> None:
        """Set the error of a job whose results are lost for good; its state stays SUCCEEDED, which was told already."""
        assert pending.error is not None
        error = describe(pending.error).problem()
        if pending.job in self._recent:
            self._recent[pending.job] = self._recent[pending.job].model_copy(update={"error": error})
        self._background.spawn(self.queue.set_error(pending.job, error))
