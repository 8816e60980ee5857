"""Jobs as their owners see them: submitted, awaited, cancelled; durable ones and those of a single request.

States: queued -> running -> succeeded | failed | cancelled | expired, and running -> queued when a worker is lost. A
job is on record before its submission is answered, and its results before it is called succeeded. A worker may be at
it before that: if it cannot be put on record, what came of it is thrown away, and the submission is refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError
from pydantic_core import from_json

from gemmserve_kernels import KernelError
from gemmserve_service.errors import IdempotencyMismatch, ItemInvalid, NotFound, ServiceError, describe
from gemmserve_service.executor.protocol import Done
from gemmserve_service.jobs.compile_program import product_result
from gemmserve_service.jobs.forms.form import Asked, Ended, Fresh, plain, record_text, record_texts, whole
from gemmserve_service.jobs.forms.known_forms import KnownForms
from gemmserve_service.jobs.idempotency import IdempotencyKeys, RememberedKey, digest_of
from gemmserve_service.jobs.job_queue import NewJob, request_of
from gemmserve_service.jobs.live_jobs import LiveJob, LiveJobs
from gemmserve_service.jobs.one_shot import OneShot, run_once
from gemmserve_service.jobs.prepare import failure, final_fields, prepare, prepare_alike, steps_of
from gemmserve_service.jobs.recorder import LostBytesError, Recorder
from gemmserve_service.jobs.recovery import recover
from gemmserve_service.jobs.retention import purge
from gemmserve_service.runtime import clock
from gemmserve_service.runtime.background import Background, report
from gemmserve_service.runtime.clock import now
from gemmserve_service.runtime.ids import new_id
from gemmserve_service.runtime.tracing.spans import REQUEST, link_job
from gemmserve_service.runtime.yielding import Turns
from gemmserve_service.scheduling.admission import nothing
from gemmserve_service.schemas import GemmParams, GemmReduceParams, JobInfo, JobState, ProgramJob
from gemmserve_service.store.catalog import to_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from gemmserve_service.jobs.cells.operands import Operands
    from gemmserve_service.jobs.forms.form import AnyRequest, Form
    from gemmserve_service.jobs.job_queue import JobQueue, Unfinished
    from gemmserve_service.jobs.observers import Observer
    from gemmserve_service.runtime.tracing.spans import Tracing
    from gemmserve_service.scheduling.scheduler import Scheduler
    from gemmserve_service.scheduling.tasks import Task
    from gemmserve_service.schemas import ArrayInfo, GemmJob, GemmReduceJob
    from gemmserve_service.settings import Settings
    from gemmserve_service.store.array_store import ArrayStore
    from gemmserve_service.store.pending import PendingResults
    from gemmserve_service.store.pin import Pinned
    from gemmserve_service.store.upload import Upload

_WAITS_WITHIN_S: Final = 0.002
"""Seconds for which the record of a job whose end is waited for may wait for that end, so that one commit has both."""

_ENDS_WITHIN_S: Final = 0.01
"""Seconds for which the record of an end that nobody waits for may wait for others, so that one commit has many: each
wakes a thread, which then competes for the interpreter. Who begins to wait has it recorded at once."""

_SHOWN: Final = 0.01
"""Share of a job by which it has to get on before those who watch it are told: each change is kept until its end."""

_ALIKE_AT_ONCE: Final = 64
"""Jobs of one form that are prepared in one go, which takes about a millisecond."""

_OVER: Final = {"compiling": False, "estimated_s": None, "share": 0.0}
"""Fields that mean something only while a job runs."""

Prepared = tuple["Task", "Callable[[], None]"]
"""A job's task, and what gives its steps back."""

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _End:
    """End of a job on its way to the record."""

    live: LiveJob
    info: JobInfo | Ended
    task: Task | None
    uploads: Mapping[str, Upload]
    """Results, which become arrays by it."""
    infos: Mapping[str, ArrayInfo]
    rows: Sequence[dict[str, Any]]
    pending: PendingResults | None
    held: Sequence[Pinned]


class Jobs(LiveJobs):
    """Listens to the scheduler (`scheduler.Listener`) for durable jobs; belongs to the event loop's thread."""

    def __init__(
        self,
        settings: Settings,
        store: ArrayStore,
        queue: JobQueue,
        scheduler: Scheduler,
        observers: list[Observer],
        tracing: Tracing | None = None,
    ) -> None:
        super().__init__(queue, observers)
        self.settings = settings
        self.store = store
        self.scheduler = scheduler
        self._tracing = tracing
        self._keys = IdempotencyKeys(settings.idempotency_ttl_s)
        self.forms = KnownForms()
        """Forms of the jobs that were asked for last."""
        self._background = Background()
        self._writes: set[_End] = set()
        """Ends whose writes are under way."""
        self._no_writes: asyncio.Future[None] | None = None
        """Future of `stop`, which waits for the last of them."""
        self._purge: asyncio.Task[None] | None = None
        self.recorder = Recorder(store, queue)
        scheduler.writes.on_lost = self._lost
        self.operands: Operands | None = None
        """Operands of other cells; None: there are none."""
        self._prepare = partial(prepare, store=store, scheduler=scheduler, listener=self)
        self._prepare_alike = partial(prepare_alike, store=store, scheduler=scheduler, listener=self)

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
        if self.operands is not None:
            await self.operands.stop()
        self.recorder.stop()
        self.queue.stop()
        if self._purge is not None:
            self._purge.cancel()
        while self._writes:
            self._no_writes = asyncio.get_running_loop().create_future()
            await self._no_writes
        await self._background.wait()

    # -- durable jobs -----------------------------------------------------------------------------------------------

    async def submit(
        self,
        request: AnyRequest,
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
        (live,), created = await self.accept([request], idempotency_key, owner, waits=waits, several=False)
        return live.info, created

    async def submit_many(
        self,
        requests: Sequence[AnyRequest],
        *,
        idempotency_key: str | None = None,
        owner: str = "",
        waits: bool = False,
    ) -> tuple[list[JobInfo], bool]:
        """Queues all of them, by one transaction, or none: see `submit`. The key is that of all of them together.

        Raises what `submit` raises; ItemInvalid, which names the job, where the cause is one of them.
        """
        lives, created = await self.accept(requests, idempotency_key, owner, waits=waits, several=True)
        return [live.info for live in lives], created

    def accept_now(
        self, asked: Asked, idempotency_key: str | None, owner: str, *, waits: bool
    ) -> tuple[LiveJob, asyncio.Future[Any]] | None:
        """A job, and what is done once it is on record. None: nothing has happened, and `accept` has more to do for
        this one than can be done without waiting. `waits`: see `submit`; raises what that raises.
        """
        if self.operands is not None:
            return None
        arrived = time.monotonic()
        text = asked.form.text(asked.ids)
        if idempotency_key is None:
            return self._admit_now(asked, text, None, owner, arrived, waits=waits)
        digest = digest_of(text)
        try:
            if self._keys.jobs_of(owner, idempotency_key, digest) is not None:
                return None
        except IdempotencyMismatch:
            return None
        self._keys.arrive(owner, idempotency_key, digest)
        admitted = None
        try:
            admitted = self._admit_now(asked, text, (idempotency_key, digest), owner, arrived, waits=waits)
        finally:
            if admitted is None:
                self._keys.arrived(owner, idempotency_key)
        return admitted

    def _admit_now(
        self, asked: Asked, text: str, key: tuple[str, str] | None, owner: str, arrived: float, *, waits: bool
    ) -> tuple[LiveJob, asyncio.Future[Any]] | None:
        self.scheduler.check_place(owner)
        tasks = self._prepare_alike(asked.form, (asked.ids,), owner)
        if tasks is None:
            return None
        prepared = [(tasks[0], nothing)]
        (live,), insert = self._enter((asked,), (text,), prepared, key, owner, arrived, waits=waits, several=False)
        return live, insert

    async def accept(
        self,
        requests: Sequence[AnyRequest],
        idempotency_key: str | None,
        owner: str,
        *,
        waits: bool,
        several: bool,
    ) -> tuple[Sequence[LiveJob], bool]:
        """`submit` and `submit_many`: the jobs, which are on record."""
        arrived = time.monotonic()
        texts = record_texts(requests)
        if idempotency_key is None:
            lives, insert = await self._take_in(requests, texts, None, owner, arrived, waits=waits, several=several)
        else:
            digest = digest_of("\n".join(texts))
            try:
                known = self._keys.jobs_of(owner, idempotency_key, digest)
            except IdempotencyMismatch:
                known = await self._recorded_earlier(owner, idempotency_key, requests, texts)
            if known is not None:
                return [await self._known(job_id) for job_id in known], False
            self._keys.arrive(owner, idempotency_key, digest)
            try:
                key = (idempotency_key, digest)
                lives, insert = await self._take_in(requests, texts, key, owner, arrived, waits=waits, several=several)
            except BaseException:
                self._keys.arrived(owner, idempotency_key)
                raise
        await asyncio.shield(insert)
        return lives, True

    async def _known(self, job_id: str) -> LiveJob:
        """The job of an Idempotency-Key that was used before. Raises NotFound."""
        live, ended = self._live.get(job_id), self._recent.get(job_id)
        if live is None and isinstance(ended, Ended):
            live = LiveJob([ended.fresh, ended], None, nothing)
        if live is None:
            return LiveJob([await self.get(job_id)], None, nothing)
        if live.first.trace:
            link_job(live.first.trace)
        return live

    async def _recorded_earlier(
        self,
        owner: str,
        key: str,
        requests: Sequence[AnyRequest],
        texts: Sequence[str],
    ) -> list[str]:
        """Jobs of the key whose requests are `texts` if they are written as this version writes them.

        An earlier one may have put them on record with other fields, or in another order. Raises IdempotencyMismatch.
        """
        known = self._keys.jobs_of(owner, key) or []
        if len(known) == len(requests):
            for job_id, request, text in zip(known, requests, texts, strict=True):
                if not await self._is_recorded(job_id, plain(request), text):
                    break
            else:
                return known
        raise IdempotencyMismatch("this Idempotency-Key was used for another request")

    async def _is_recorded(self, job_id: str, request: GemmJob | GemmReduceJob | ProgramJob, text: str) -> bool:
        """Whether that job's request is `request`, which this version writes as `text`. A short request is no reason to
        read a long one again, which takes milliseconds.
        """
        try:
            stored = (await self.get(job_id)).request or {}
            steps = request.steps if isinstance(request, ProgramJob) else ()
            if stored.get("op") != request.op or len(stored.get("steps", ())) != len(steps):
                return False
            return record_text(request_of(stored)) == text
        except (NotFound, ValidationError):  # of a job that is forgotten, or of a request that is none any more
            return False

    async def _take_in(
        self,
        requests: Sequence[AnyRequest],
        texts: Sequence[str],
        key: tuple[str, str] | None,
        owner: str,
        arrived: float,
        *,
        waits: bool,
        several: bool,
    ) -> tuple[list[LiveJob], asyncio.Future[Any]]:
        """The jobs, which workers may have when this returns, and what is done once they are on record."""
        if self.operands is None:
            return await self._admit(requests, texts, key, owner, arrived, waits=waits, several=several)
        with ExitStack() as held:
            here = [plain(request) for request in requests]
            gathered = await self.operands.gather(here, owner, held)
            if gathered is not here:
                texts = record_texts(gathered)
            return await self._admit(gathered, texts, key, owner, arrived, waits=waits, several=several)

    async def _admit(
        self,
        requests: Sequence[AnyRequest],
        texts: Sequence[str],
        key: tuple[str, str] | None,
        owner: str,
        arrived: float,
        *,
        waits: bool,
        several: bool,
    ) -> tuple[list[LiveJob], asyncio.Future[Any]]:
        with self.scheduler.admission(owner, len(requests)) as claim:
            prepared: list[Prepared] = []
            try:
                await self._prepare_all(requests, owner, claim, prepared, several=several)
            except BaseException:
                _give_up(prepared)
                raise
            return self._enter(requests, texts, prepared, key, owner, arrived, waits=waits, several=several)

    def _enter(
        self,
        requests: Sequence[AnyRequest],
        texts: Sequence[str],
        prepared: Sequence[Prepared],
        key: tuple[str, str] | None,
        owner: str,
        arrived: float,
        *,
        waits: bool,
        several: bool,
    ) -> tuple[list[LiveJob], asyncio.Future[Any]]:
        """Put jobs into the queue and on record: see `_take_in`. What it raises leaves nothing of them.

        In this order, so that a worker begins meanwhile. An end that comes first waits: whatever is recorded of a job
        comes after it.
        """
        # Who waits for several waits for the last of them (`wait_all`), and the others need not hurry.
        watched = waits and len(prepared) == 1
        try:
            self.queue.check_open()
            lives, rows = self._live_of(requests, texts, prepared, owner, arrived, watched=watched)
        except BaseException:
            _give_up(prepared)
            raise
        remembered = None
        try:
            for live, (task, _) in zip(lives, prepared, strict=True):
                task.submitted, task.waited_for = arrived, watched
                self._entered(task.id, live, JobState.QUEUED)
                self.scheduler.submit(task, soon=several)
            if key is not None:
                ids = ",".join([row.info.id for row in rows])
                remembered = RememberedKey(owner, *key, ids, rows[0].info.created_at.timestamp())
            insert = self.queue.insert(rows, remembered, within_s=_WAITS_WITHIN_S if waits else 0.0)
        except BaseException as error:
            self._refuse(lives, error)
            raise
        finally:
            for live in lives:
                live.entered = True
                if live.early is not None:
                    (outcome, held), live.early = live.early, None
                    self._end(live, outcome, live.task, held)
        insert.add_done_callback(partial(self._inserted, lives, remembered))
        return lives, insert

    async def _prepare_all(
        self,
        requests: Sequence[AnyRequest],
        owner: str,
        claim: Callable[[int], None],
        prepared: list[Prepared],
        *,
        several: bool,
    ) -> None:
        """Add the task of each request, and what gives its steps back, to `prepared`.

        Raises what `prepare` raises; `several`: as ItemInvalid.
        """
        turns = Turns()
        for item, form, count in _runs(requests):
            alike = requests[item : item + count]
            if form is not None:
                operands = [request.ids for request in alike if isinstance(request, Asked)]
                tasks = self._prepare_alike(form, operands, owner, claim=claim)
                if tasks is not None:
                    prepared += [(task, nothing) for task in tasks]
                    await turns.pause()
                    continue
            for number, request in enumerate(alike, item):
                try:
                    prepared.append(await self._prepare_one(plain(request), owner, claim))
                except (KernelError, ServiceError) as error:
                    if not several:
                        raise
                    raise ItemInvalid(number, error) from error
                if several:
                    await turns.pause()

    async def _prepare_one(
        self, request: GemmJob | GemmReduceJob | ProgramJob, owner: str, claim: Callable[[int], None]
    ) -> Prepared:
        steps = self.scheduler.admissions.take_steps(owner, steps_of(request))
        try:
            return await self._prepare(new_id("job", self.settings.cell), request, owner, claim=claim), steps
        except BaseException:
            steps()
            raise

    def _live_of(
        self,
        requests: Sequence[AnyRequest],
        texts: Sequence[str],
        prepared: Sequence[Prepared],
        owner: str,
        arrived: float,
        *,
        watched: bool,
    ) -> tuple[list[LiveJob], list[NewJob]]:
        """The jobs, and what is to be recorded of them."""
        created = now()
        created_at = created.timestamp()
        asking = REQUEST.get()
        rows, lives = [], []
        for request, text, (task, steps) in zip(requests, texts, prepared, strict=True):
            trace = ""
            if asking is not None:
                task.trace = asking.job(arrived)
                trace = task.trace.traceparent
            info: JobInfo | Fresh
            if isinstance(request, Asked):
                info = Fresh(request.form, request.ids, task.id, created, owner, trace)
            else:
                info = JobInfo(
                    id=task.id,
                    state=JobState.QUEUED,
                    op=request.op,
                    created_at=created,
                    request=from_json(text),
                    owner=owner,
                    trace=trace,
                )
            deadline_at = None if task.timeout_s is None else created_at + task.timeout_s
            rows.append(NewJob(info, text, deadline_at, "" if asking is None else asking.traceparent))
            lives.append(LiveJob([info], task, steps, watched=watched, trace=task.trace, entered=False))
        self._live.update({live.first.id: live for live in lives})
        return lives, rows

    def _inserted(self, lives: Sequence[LiveJob], key: RememberedKey | None, insert: asyncio.Future[Any]) -> None:
        """Called when the jobs' rows are written, or cannot be: what is not on record was not accepted, and leaves
        nothing. Their key is taken until then, also where the client has hung up.
        """
        error = insert.exception()
        if key is not None:
            self._keys.arrived(key.owner, key.key)
            if error is None:
                self._keys.remember(key)
        if error is not None:
            self._refuse(lives, error)

    def _refuse(self, lives: Sequence[LiveJob], error: BaseException) -> None:
        for live in lives:
            live.refused = error if isinstance(error, Exception) else RuntimeError(str(error))
            task = live.task
            if task is not None and not task.over:
                self.scheduler.cancel(task)
                end = final_fields(failure(live.refused)) | {"finished_at": now()}
                self._forget(live, live.info.model_copy(update=end))

    async def _resume(self, job: Unfinished) -> None:
        info = job.info.model_copy(update={"state": JobState.QUEUED, "started_at": None})
        steps = self.scheduler.admissions.take_steps(info.owner, steps_of(job.request), recovered=True)
        trace = None
        if info.trace and self._tracing is not None:
            trace = self._tracing.resumed(info.trace, info.created_at.timestamp())
            info.trace = "" if trace is None else trace.traceparent
        live = self._live[info.id] = LiveJob([info], None, steps, trace=trace)
        try:
            task = await self._prepare(info.id, job.request, info.owner, claim=None)
        except (ServiceError, ValueError) as error:  # KernelError is a ValueError
            self._end(live, failure(error), None, [])
            return
        task.attempt, task.crashes, task.trace = info.attempt, job.crashes, trace
        live.task = task
        if job.deadline_at is not None:
            task.timeout_s = max(job.deadline_at - clock.time(), 0.0)
        self.scheduler.submit(task)

    async def cancel(self, job_id: str, *, owner: str = "") -> JobInfo:
        """Cancels a job that is not final; returns it as it is then. Raises NotFound."""
        await self.get(job_id, owner=owner)
        live = self._watch(job_id)
        if live is not None and live.task is not None:
            self.scheduler.cancel(live.task)
            while job_id in self._live and not live.given_up:
                await live.changed()
        return await self.get(job_id)

    # -- scheduler.Listener -----------------------------------------------------------------------------------------

    def started(self, task: Task) -> None:
        """Called when a worker was sent the task."""
        began = now()
        live = self._live[task.id]
        estimated_s = round(task.duration_s, 6)
        live.change(
            {"state": JobState.RUNNING, "attempt": task.attempt, "started_at": began, "estimated_s": estimated_s}
        )
        self._entered(task.id, live, JobState.RUNNING)
        self.queue.started(task.id, task.attempt, began)

    def compiling(self, task: Task, compiles: bool) -> None:
        """Called when the task begins to wait for the compiler, and when it no longer does; not put on record."""
        self._live[task.id].change({"compiling": compiles})

    def progressed(self, task: Task, share: float) -> None:
        """Called when so much of the task is done, 0 to 1; not put on record. It never goes back while it runs."""
        live = self._live[task.id]
        share = min(share, 1.0)
        if share >= live.progress + _SHOWN or (share == 1.0 and live.progress < 1.0):
            live.progress = share
            live.change({"share": round(share, 4)})

    def requeued(self, task: Task) -> None:
        """Called when the task's worker was lost, and it waits again."""
        live = self._live[task.id]
        live.progress = 0.0
        waits = {"state": JobState.QUEUED, "started_at": None, "estimated_s": None, "compiling": False, "share": 0.0}
        live.change(waits)
        self._entered(task.id, live, JobState.QUEUED)
        self.queue.requeued(live.info, task.crashes).add_done_callback(report)

    def ended(self, task: Task, outcome: Done | ServiceError) -> None:
        """Called when the task is over: its end is put on record."""
        live = self._live[task.id]
        if live.refused is not None:
            return
        # The operands stay until then: were they freed before, a crash would start the job again on what came to lie in
        # their place. After success their pins are the job's or its pending results'; else the scheduler releases them.
        held = [] if isinstance(outcome, Done) else [pinned.share() for pinned in task.operands.values()]
        if live.entered:
            self._end(live, outcome, task, held)
        else:
            live.early = outcome, held

    def _end(self, live: LiveJob, outcome: Done | ServiceError, task: Task | None, held: Sequence[Pinned]) -> None:
        """Put a job's end on record; `_conclude` follows. `held`: pins to be released then."""
        uploads = task.results if task is not None and isinstance(outcome, Done) else {}
        pending = task.pending if uploads and task is not None else None
        finished = now()
        update = {**final_fields(outcome), **_OVER, "finished_at": finished}
        infos, rows, result = {}, [], {}
        job = None if pending is None else live.first.id
        for name, upload in uploads.items():
            array = infos[name] = self.store.describe(upload, finished)
            rows.append(to_row(array, upload.extent, job))
            result[name if live.op == "program" else product_result(name)] = array.id
        if isinstance(outcome, Done):
            update["result"] = result
            if live.op != "program":  # a product of views was run as one
                update["steps"] = None
        info = live.succeeded_by(update) if isinstance(outcome, Done) else live.changed_by(update)
        end = _End(live, info, task, uploads, infos, rows, pending, held)
        live.ending = True
        if uploads and pending is None and self.store.secures:
            self._background.spawn(self._record(end))
            return
        self._writes.add(end)
        try:
            self.queue.end(info, rows, partial(self._written, end), within_s=0.0 if live.watched else _ENDS_WITHIN_S)
        except Exception as error:  # which is raised again there, and told
            self._written(end, error)

    def _written(self, end: _End, error: BaseException | None) -> None:
        self._writes.discard(end)
        if not self._writes and self._no_writes is not None and not self._no_writes.done():
            self._no_writes.set_result(None)
        if error is None:
            self._conclude(end)
        else:
            self._background.spawn(self._record(end))

    async def _record(self, end: _End) -> None:
        """Put an end on record that has to wait for the disk, or could not be written at first."""
        live = end.live
        to_secure = list(end.uploads.values()) if end.pending is None else []

        def refused() -> bool:
            return live.refused is not None

        try:
            try:
                recorded = await self.recorder.record(end.info, to_secure, end.rows, refused)
            except LostBytesError as error:
                assert end.task is not None
                assert end.info.algorithm is not None
                log.warning("job %s: its results are computed again (%s)", end.info.id, error)
                end.pending = self.scheduler.writes.track_lost(end.task, end.info.algorithm)
                end.rows = [to_row(end.infos[name], upload.extent, end.info.id) for name, upload in end.uploads.items()]
                recorded = await self.recorder.record(end.info, [], end.rows, refused)
            if not recorded:
                live.given_up = True
                live.wake()
                return  # the server stops: the next one runs the job again
        except Exception as error:
            if live.refused is None:
                log.exception("job %s: its end cannot be recorded", end.info.id)
            self._conclude(end, error)
        else:
            self._conclude(end)

    def _conclude(self, end: _End, error: Exception | None = None) -> None:
        """Tell those who wait, now that the end is on record; or that it cannot be, for that `error`."""
        live, info, task, uploads, pending = end.live, end.info, end.task, end.uploads, end.pending
        if error is None:
            records = []
            for name, upload in uploads.items():
                upload.seal()
                records.append(self.store.index(end.infos[name], upload))
            if pending is not None:
                self.scheduler.writes.recorded(pending, records)
        else:
            fields = final_fields(failure(error)) | {"finished_at": now(), "compiling": False}
            info = live.changed_by(fields)
            if pending is not None and task is not None:
                self.scheduler.writes.abandon(task)
            for upload in uploads.values() if pending is None else ():
                upload.abort()
        if task is not None and end.info.state is JobState.SUCCEEDED and pending is None:
            task.unpin()
        for pinned in end.held:
            pinned.release()
        if (info.op != "program" or error is not None) and live.refused is None:  # long programs are in the database
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
        priority: int = 0,
    ) -> OneShot:
        """Runs a product of uploads that are filled, through the same scheduler, without the database. `priority`: its
        rank among its owner's.

        The operands are taken over. Cancelling the caller's task cancels the job. Raises KernelError, BodyTooShort,
        StoreFull, QueueFull, NotReady, Draining, JobTimeout, JobFailed, WorkerCrashed.
        """
        return await run_once(
            params,
            operands,
            timeout_s=timeout_s,
            owner=owner,
            priority=priority,
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
            self._recent[pending.job] = whole(self._recent[pending.job]).model_copy(update={"error": error})
        self._background.spawn(self.queue.set_error(pending.job, error))


def _runs(requests: Sequence[AnyRequest]) -> Iterator[tuple[int, Form | None, int]]:
    """Yield requests of one form that follow each other, some at a time: the number of the first, the form, how many.
    Those that have none come one by one.
    """
    item = 0
    while item < len(requests):
        first, count = requests[item], 1
        form = first.form if isinstance(first, Asked) else None
        if form is not None:
            most = min(len(requests), item + _ALIKE_AT_ONCE)
            while item + count < most and getattr(requests[item + count], "form", None) is form:
                count += 1
        yield item, form, count
        item += count


def _give_up(prepared: Sequence[Prepared]) -> None:
    for task, steps in prepared:
        task.close()
        steps()
