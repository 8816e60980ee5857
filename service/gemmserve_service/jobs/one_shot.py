"""The job of a single request: the same scheduler, but no row, no id that anybody learns, nothing kept."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemmserve_service import products
from gemmserve_service.errors import JobCancelled, JobTimeout, ServiceError, describe
from gemmserve_service.executor.protocol import Done
from gemmserve_service.jobs.prepare import reserve_results
from gemmserve_service.runtime.ids import new_id
from gemmserve_service.runtime.tracing.spans import product_trace
from gemmserve_service.scheduling.tasks import Task
from gemmserve_service.schemas import JobState

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_service.scheduling.scheduler import Scheduler
    from gemmserve_service.schemas import Elements, GemmParams, GemmReduceParams, Problem, Timings
    from gemmserve_service.store.array_store import ArrayStore
    from gemmserve_service.store.pin import Pinned
    from gemmserve_service.store.upload import Upload


@dataclass
class OneShot:
    """Outcome of a job of a single request. `release` when the results have been sent."""

    results: dict[str, Pinned]
    algorithm: str
    timings: Timings
    residual: float | None
    elements: Elements | None

    def release(self) -> None:
        """Gives the results' space back; idempotent."""
        for pinned in self.results.values():
            pinned.release()


@dataclass(eq=False)
class Waiter:
    """The scheduler's listener: hands the outcome to whoever awaits it."""

    outcome: asyncio.Future[Done | ServiceError]

    def started(self, task: Task) -> None:
        """Do nothing."""

    def compiling(self, task: Task, compiles: bool) -> None:
        """See `scheduling.tasks.Listener`."""

    def progressed(self, task: Task, share: float) -> None:
        """Do nothing."""

    def requeued(self, task: Task) -> None:
        """Do nothing."""

    def ended(self, task: Task, outcome: Done | ServiceError) -> None:
        """Wakes the one who waits. One who has just been cancelled cannot take the results over: they go."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)
        elif isinstance(outcome, Done):
            task.close()


async def run_once(
    params: GemmParams | GemmReduceParams,
    operands: dict[str, Upload],
    *,
    timeout_s: float | None,
    owner: str,
    priority: int = 0,
    store: ArrayStore,
    scheduler: Scheduler,
    observe: Callable[[EndedJob, tuple[int, int]], None],
) -> OneShot:
    """See `Jobs.run`."""
    arrived = time.monotonic()
    with contextlib.ExitStack() as undo:
        for upload in operands.values():
            undo.callback(upload.abort)
        with scheduler.admission(owner) as claim:
            pins: dict[str, Pinned] = {}
            for name, upload in operands.items():
                await upload.commit()
                pins[name] = undo.enter_context(store.pin_upload(upload))
            problem = products.build_stored(params, {name: pinned.info for name, pinned in pins.items()})
            plans = scheduler.check(problem)
            claim(problem.nbytes())
            results = await reserve_results(store, products.outputs(problem), math.inf, scratch=True, owner=owner)
        undo.pop_all()
    waiter = Waiter(asyncio.get_running_loop().create_future())
    task = Task(
        new_id("job", scheduler.settings.cell),
        params,
        problem,
        pins,
        results,
        waiter,
        owner=owner,
        priority=priority,
        timeout_s=scheduler.settings.oneshot_timeout_s if timeout_s is None else timeout_s,
        durable=False,
        submitted=arrived,
        plans=plans,
        trace=product_trace(),
    )
    scheduler.submit(task)
    outcome = await outcome_of(task, waiter, scheduler, observe)
    task.unpin()
    pinned = {}
    for name, upload in results.items():
        upload.filled = upload.nbytes
        await upload.commit()
        pinned[name] = store.pin_upload(upload)
    return OneShot(pinned, outcome.algorithm, outcome.timings, outcome.residual, outcome.elements)


async def outcome_of(
    task: Task, waiter: Waiter, scheduler: Scheduler, observe: Callable[[EndedJob, tuple[int, int]], None]
) -> Done:
    """Wait for the end of a task that was submitted, and tell the observers. Its operands and results are the caller's.

    If the caller is cancelled, so is the task. Raises what ended it.
    """
    try:
        outcome = await waiter.outcome
    except asyncio.CancelledError:
        if not task.over:
            scheduler.cancel(task)
        elif not waiter.outcome.cancelled() and isinstance(waiter.outcome.result(), Done):
            task.close()
        observe(summary(task, JobCancelled("the client hung up")), task.size)
        raise
    observe(summary(task, outcome), task.size)
    if isinstance(outcome, ServiceError):
        raise outcome
    return outcome


@dataclass(slots=True)
class EndedJob:
    """Fields of a `JobInfo` that observers read, for a job of a single request that is over."""

    id: str
    op: str
    owner: str
    state: JobState
    timings: Timings | None = None
    algorithm: str | None = None
    residual: float | None = None
    mismatch: float | None = None
    elements: Elements | None = None
    error: Problem | None = None
    trace: str = ""
    """Traceparent of the span that it belongs to, where it is traced."""


def summary(task: Task, outcome: Done | ServiceError) -> EndedJob:
    """A finished job of a single request, for the observers."""
    op = task.params.op
    trace = "" if task.trace is None else task.trace.traceparent
    if isinstance(outcome, Done):
        return EndedJob(
            task.id, op, task.owner, JobState.SUCCEEDED,
            outcome.timings, outcome.algorithm, outcome.residual, outcome.mismatch, outcome.elements,
            trace=trace,
        )  # fmt: skip
    if isinstance(outcome, JobCancelled):
        return EndedJob(task.id, op, task.owner, JobState.CANCELLED)
    state = JobState.EXPIRED if isinstance(outcome, JobTimeout) else JobState.FAILED
    return EndedJob(task.id, op, task.owner, state, error=describe(outcome).problem())
