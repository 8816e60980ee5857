"""Which task runs next, and where: priority, then first come first served, one task at a time on each worker.

Everything here happens in the event loop's thread. A task is told of its fate exactly once, through its listener; its
operands and the space for its results stay held until no worker can touch them any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Protocol

from gemmserve_kernels import KernelError, Plan, plan
from gemmserve_service.errors import (
    Description,
    Draining,
    JobCancelled,
    JobFailed,
    JobTimeout,
    NotReady,
    QueueFull,
    ServiceError,
    WorkerCrashed,
    describe,
)
from gemmserve_service.executor.protocol import ArrayRef, Done, Failed, Run
from gemmserve_service.schemas import ArrayInfo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gemmserve_kernels.device import DeviceSpec
    from gemmserve_service.executor.base import Executor, Worker
    from gemmserve_service.extents import Extent
    from gemmserve_service.operations import Problem
    from gemmserve_service.pins import Pinned
    from gemmserve_service.schemas import GemmParams, GemmReduceParams
    from gemmserve_service.settings import Settings
    from gemmserve_service.store import ArrayStore
    from gemmserve_service.uploads import Upload

_SMOOTHING: Final = 0.1  # of the running mean of the time between two ends; no measurement behind the figure
_RETRY_SHARE: Final = 0.1  # a refused client comes back when a tenth of the queue has gone
_LONGEST_RETRY_S: Final = 60.0
_MOST_ENDED: Final = 256  # entries of ended tasks that the heap may hold beside as many as wait


class Listener(Protocol):
    """Told what becomes of a task."""

    def started(self, task: Task) -> None:
        """A worker was sent it; `task.attempt` counts."""

    def requeued(self, task: Task) -> None:
        """Its worker was lost; it waits again."""

    def ended(self, task: Task, outcome: Done | ServiceError) -> None:
        """Nothing more happens. On Done the listener takes `operands` and `results` over; otherwise they go."""


@dataclass(eq=False)
class Task:
    """One product on its way: what to compute, on what, into what."""

    id: str
    params: GemmParams | GemmReduceParams
    problem: Problem
    operands: dict[str, Pinned]
    results: dict[str, Upload]
    listener: Listener
    priority: int = 0
    timeout_s: float | None = None
    """Seconds from now until the deadline."""
    verify: bool = False
    durable: bool = True
    """Whether it starts again with the server; others are refused when it drains."""
    attempt: int = 0
    submitted: float = field(default_factory=time.monotonic)
    queue_s: float = 0.0
    over: bool = False
    """The listener has been told; a worker may still be at it."""
    worker: Worker | None = None
    order: tuple[int, int] = (0, 0)
    timer: asyncio.TimerHandle | None = None
    plans: dict[str, Plan | KernelError] = field(default_factory=dict)
    """By worker, how its device runs this, or why it cannot."""

    @cached_property
    def size(self) -> tuple[int, int]:
        """Bytes and operations of the problem."""
        return self.problem.nbytes(), self.problem.flops()

    def close(self, *, reusable: bool = True) -> None:
        """Gives operands and results back. Not `reusable`: a lost process may still write to the results."""
        for upload in self.results.values():
            if reusable:
                upload.abort()
            else:
                upload.discard()
        self.unpin()

    def unpin(self) -> None:
        """Lets the operands go."""
        for pinned in self.operands.values():
            pinned.release()


class Scheduler:
    """The queue in memory and the workers' bookkeeping; the executor reports to it (`ExecutorOwner`)."""

    def __init__(self, settings: Settings, store: ArrayStore, executor: Executor) -> None:
        self.settings = settings
        self.executor = executor
        self.draining = False
        self._heap: list[tuple[tuple[int, int], Task]] = []
        self._queued: set[Task] = set()
        self._sequence = itertools.count()
        self._arriving = 0
        self._idle = asyncio.Event()
        self._interval_s: float | None = None
        self._last_end = 0.0
        store.on_extent_destroyed(self._forget)

    # -- admission --------------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Tasks that wait."""
        return len(self._queued)

    @property
    def running(self) -> int:
        """Tasks that a worker has."""
        return sum(len(worker.tasks) for worker in self.executor.workers())

    @contextlib.contextmanager
    def admission(self) -> Iterator[None]:
        """A place in the queue for a task that is being prepared. Raises Draining, NotReady or QueueFull."""
        self._admit()
        self._arriving += 1
        try:
            yield
        finally:
            self._arriving -= 1

    def _admit(self) -> None:
        if self.draining:
            raise Draining("the server is shutting down", retry_after_s=self.settings.drain_s)
        if not any(worker.spec for worker in self.executor.workers()):
            raise NotReady("no worker has answered a verified product yet", retry_after_s=1.0)
        if self.queued + self._arriving >= self.settings.max_queued_jobs:
            raise QueueFull(f"{self.queued} jobs are waiting already", retry_after_s=self._retry_after_s())

    def check(self, problem: Problem) -> dict[str, Plan | KernelError]:
        """`Task.plans` for every device that is known. Raises the KernelError of one if none can run the problem."""
        plans = {worker.id: _plan(problem, worker.spec) for worker in self.executor.workers() if worker.spec}
        errors = [found for found in plans.values() if isinstance(found, KernelError)]
        if errors and len(errors) == len(plans):
            raise errors[0]
        return plans

    def submit(self, task: Task) -> None:
        """Queues an admitted task; ends it if the server began to drain while it was prepared and nothing keeps it."""
        if self.draining and not task.durable:
            self._drop(task, self._draining())
            return
        task.order = (-task.priority, next(self._sequence))
        if task.timeout_s is not None:
            task.timer = asyncio.get_running_loop().call_later(task.timeout_s, self._expire, task)
        self._enqueue(task)
        self._dispatch()

    def cancel(self, task: Task) -> None:
        """Ends a task with JobCancelled: a queued one is never run, a running one's result is dropped."""
        self._drop(task, JobCancelled("the job was cancelled"))

    # -- shutting down ----------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Nothing new is admitted or started. Tasks of one request end with Draining; durable ones stay queued."""
        self.draining = True
        for task in [task for task in self._queued if not task.durable]:
            self._drop(task, self._draining())

    async def idle(self, timeout_s: float) -> bool:
        """Waits until no task runs whose outcome anybody wants; False if one still does after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._wanted():
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return not self._wanted()
        return True

    def stop(self) -> None:
        """No deadline fires after this, and no request waits for an answer that will not come."""
        self.draining = True
        for task in [*self._queued, *self._wanted()]:
            if not task.durable:
                self._drop(task, self._draining())
            elif task.timer is not None:
                task.timer.cancel()

    # -- ExecutorOwner ----------------------------------------------------------------------------------------------

    def worker_ready(self, worker: Worker) -> None:
        """It takes tasks from now on. Its device may be another than before."""
        for task in self._queued:
            task.plans.pop(worker.id, None)
        self._dispatch()

    def worker_lost(self, worker: Worker) -> None:
        """What it had is queued again, in its old place, or fails after `max_attempts`."""
        tasks = list(worker.tasks.values())
        worker.tasks.clear()
        for task in tasks:
            task.worker = None
            if task.over:
                task.close(reusable=False)
            elif task.attempt >= self.settings.max_attempts:
                self._end(task, WorkerCrashed(f"its worker died, and it has been tried {task.attempt} times"))
                task.close(reusable=False)
            elif self.draining and not task.durable:
                self._end(task, self._draining())
                task.close(reusable=False)
            else:
                task.listener.requeued(task)
                self._enqueue(task)
        self._settle()

    def task_ended(self, worker: Worker, answer: Done | Failed) -> None:
        """A worker answered."""
        worker.memory_used = answer.memory_used if isinstance(answer, Done) else worker.memory_used
        task: Task | None = worker.tasks.pop(answer.task, None)
        if task is None:
            return
        task.worker = None
        self._measure()
        if task.over:
            task.close()
        elif isinstance(answer, Done):
            timings = answer.timings.model_copy(update={"queue_s": task.queue_s})
            self._end(task, answer.model_copy(update={"timings": timings}))
        else:
            description = Description(answer.slug, answer.status, answer.title, answer.detail, extra=answer.extra)
            self._end(task, JobFailed(description))
            task.close()
        self._settle()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _draining(self) -> Draining:
        return Draining("the server is shutting down", retry_after_s=self.settings.drain_s)

    def _wanted(self) -> list[Task]:
        return [task for worker in self.executor.workers() for task in worker.tasks.values() if not task.over]

    def _enqueue(self, task: Task) -> None:
        self._queued.add(task)
        if len(self._heap) > 2 * len(self._queued) + _MOST_ENDED:  # mostly tasks that ended while they waited
            self._heap = [entry for entry in self._heap if entry[1] in self._queued and entry[1] is not task]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (task.order, task))

    def _dispatch(self) -> None:
        """Gives every idle worker the first task that its device can run."""
        if self.draining:
            return
        for worker in self.executor.workers():
            if worker.ready and not worker.tasks and self._queued:
                task = self._take(worker)
                if task is not None:
                    self._send(worker, task)

    def _take(self, worker: Worker) -> Task | None:
        others: list[tuple[tuple[int, int], Task]] = []
        found: Task | None = None
        hopeless: list[Task] = []
        while self._heap and found is None:
            entry = heapq.heappop(self._heap)
            task = entry[1]
            if task not in self._queued:
                continue
            if worker.id not in task.plans and worker.spec is not None:
                task.plans[worker.id] = _plan(task.problem, worker.spec)
            if isinstance(task.plans[worker.id], Plan):
                found = task
                self._queued.discard(task)
            else:
                others.append(entry)
                if all(isinstance(task.plans.get(other.id), KernelError) for other in self.executor.workers()):
                    hopeless.append(task)
        for entry in others:
            heapq.heappush(self._heap, entry)
        for task in hopeless:  # admitted by an earlier server that had another device
            self._drop(task, JobFailed(describe(next(e for e in task.plans.values() if isinstance(e, KernelError)))))
        return found

    def _send(self, worker: Worker, task: Task) -> None:
        task.attempt += 1
        task.worker = worker
        task.queue_s = time.monotonic() - task.submitted
        worker.tasks[task.id] = task
        chosen = task.plans[worker.id]
        assert isinstance(chosen, Plan)  # _take saw to it
        # Without validation: everything here was validated when it came in.
        message = Run.model_construct(
            task=task.id,
            params=task.params,
            algorithm=chosen.algorithm,
            operands={
                # Scratch operands are gone after this task: a device need not keep copies of them.
                name: _ref(pinned.info, pinned.extent, pinned.info.id if isinstance(pinned.info, ArrayInfo) else None)
                for name, pinned in task.operands.items()
            },
            results={name: _ref(upload.spec, upload.extent) for name, upload in task.results.items()},
            verify=task.verify,
        )
        self.executor.send(worker, message)
        task.listener.started(task)

    def _expire(self, task: Task) -> None:
        self._drop(task, JobTimeout(f"the deadline of {task.timeout_s:g} s passed"))

    def _drop(self, task: Task, error: ServiceError) -> None:
        """Ends a task that has not ended; a worker that is at it finishes for nothing."""
        if task.over:
            return
        self._end(task, error)
        if task.worker is None:
            task.close()
        elif not self._wanted():
            self._idle.set()

    def _end(self, task: Task, outcome: Done | ServiceError) -> None:
        task.over = True
        self._queued.discard(task)
        if task.timer is not None:
            task.timer.cancel()
        task.listener.ended(task, outcome)

    def _settle(self) -> None:
        self._dispatch()
        if not self._wanted():
            self._idle.set()

    def _measure(self) -> None:
        """Keeps a running mean of the time between two ends while tasks wait."""
        clock = time.monotonic()
        if self._queued and self._last_end:
            interval = clock - self._last_end
            mean = self._interval_s if self._interval_s is not None else interval
            self._interval_s = mean + _SMOOTHING * (interval - mean)
        self._last_end = clock

    def _retry_after_s(self) -> float:
        interval = self._interval_s if self._interval_s is not None else 1.0
        return float(math.ceil(min(max(_RETRY_SHARE * self.queued * interval, 1.0), _LONGEST_RETRY_S)))

    def _forget(self, extent: str) -> None:
        if any(worker.ready for worker in self.executor.workers()):
            self.executor.forget(extent)


def _plan(problem: Problem, spec: DeviceSpec) -> Plan | KernelError:
    try:
        return plan(problem, spec)
    except KernelError as error:
        return error


def _ref(array: Any, extent: Extent | None, cache_id: str | None = None) -> ArrayRef:
    return ArrayRef.model_construct(
        extent=None if extent is None else extent.name,
        path="" if extent is None else extent.path,
        capacity=0 if extent is None else extent.capacity,
        nbytes=array.nbytes,
        dtype=array.dtype,
        shape=array.shape,
        order=array.order,
        cache_id=cache_id,
    )
