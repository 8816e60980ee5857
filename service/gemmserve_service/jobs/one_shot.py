"""The job of a single request: the same scheduler, but no row, no id that anybody learns, nothing kept."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gemmserve_service import products
from gemmserve_service.errors import JobCancelled, JobFailed, JobTimeout, ServiceError, describe
from gemmserve_service.executor.protocol import Done
from gemmserve_service.runtime.ids import new_id
from gemmserve_service.scheduling.tasks import Task
from gemmserve_service.schemas import JobState

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_service.products import Problem
    from gemmserve_service.scheduling.scheduler import Scheduler
    from gemmserve_service.schemas import Elements, GemmParams, GemmReduceParams, Timings
    from gemmserve_service.store.array_store import ArrayStore
    from gemmserve_service.store.pin import Pinned
    from gemmserve_service.store.upload import Upload


@dataclass
class OneShot:
    """What a job of a single request came to. `release` when the results have been sent."""

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
        """Nobody asks."""

    def requeued(self, task: Task) -> None:
        """Nobody asks."""

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
            claim(problem)
            results = reserve_results(store, problem, math.inf, undo, scratch=True, owner=owner)
        undo.pop_all()
    waiter = Waiter(asyncio.get_running_loop().create_future())
    task = Task(
        new_id("job"),
        params,
        problem,
        pins,
        results,
        waiter,
        owner=owner,
        timeout_s=scheduler.settings.oneshot_timeout_s if timeout_s is None else timeout_s,
        durable=False,
        submitted=arrived,
        plans=plans,
    )
    scheduler.submit(task)
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
    task.unpin()
    pinned = {}
    for name, upload in results.items():
        upload.filled = upload.nbytes
        await upload.commit()
        pinned[name] = store.pin_upload(upload)
    return OneShot(pinned, outcome.algorithm, outcome.timings, outcome.residual, outcome.elements)


def reserve_results(
    store: ArrayStore,
    problem: Problem,
    ttl_s: float,
    undo: contextlib.ExitStack,
    *,
    scratch: bool = False,
    owner: str = "",
    granted: bool = False,
) -> dict[str, Upload]:
    """Space for every result of `problem`, given back by `undo`. Raises TooLarge, StoreFull, QuotaExceeded.

    `granted`: limits were asked when the job was accepted.
    """
    results: dict[str, Upload] = {}
    for name, (shape, dtype, order) in products.outputs(problem).items():
        upload = store.allocate(dtype, shape, order, ttl_s=ttl_s, scratch=scratch, owner=owner, granted=granted)
        undo.callback(upload.abort)
        results[name] = upload
    return results


def final_fields(outcome: Done | ServiceError) -> dict[str, Any]:
    """The fields of a JobInfo that its end decides."""
    if isinstance(outcome, Done):
        return {
            "state": JobState.SUCCEEDED,
            "timings": outcome.timings,
            "algorithm": outcome.algorithm,
            "residual": outcome.residual,
            "mismatch": outcome.mismatch,
            "elements": outcome.elements,
            "steps": outcome.steps,
        }
    if isinstance(outcome, JobCancelled):
        return {"state": JobState.CANCELLED, "error": describe(outcome).problem()}
    state = JobState.EXPIRED if isinstance(outcome, JobTimeout) else JobState.FAILED
    return {"state": state, "error": describe(outcome).problem()}


def failure(error: Exception) -> ServiceError:
    """What ended a job, as its owner is told."""
    return error if isinstance(error, ServiceError) else JobFailed(describe(error))


@dataclass(slots=True)
class EndedJob:
    """What observers read of a `JobInfo`, of a job of a single request that is over."""

    id: str
    op: str
    owner: str
    state: JobState
    timings: Timings | None = None
    algorithm: str | None = None
    residual: float | None = None
    mismatch: float | None = None
    elements: Elements | None = None


def summary(task: Task, outcome: Done | ServiceError) -> EndedJob:
    """A finished job of a single request, for the observers."""
    op = task.params.op
    if isinstance(outcome, Done):
        return EndedJob(
            task.id, op, task.owner, JobState.SUCCEEDED,
            outcome.timings, outcome.algorithm, outcome.residual, outcome.mismatch, outcome.elements,
        )  # fmt: skip
    if isinstance(outcome, JobCancelled):
        return EndedJob(task.id, op, task.owner, JobState.CANCELLED)
    return EndedJob(task.id, op, task.owner, JobState.EXPIRED if isinstance(outcome, JobTimeout) else JobState.FAILED)
