"""Scheduler: the task that runs next, and where; fair shares between owners, one task at a time on each worker.

Where a worker computes in panels, a short task may pass between those of a long one, so that nobody waits for minutes.
A task that finds a worker idle is sent at once. What has gathered meanwhile, and is short, goes as one group, in the
order in which it would have gone one by one: a worker that has a hundred small products to do waits for the front once.

Everything here happens in the event loop's thread. A task is told of its fate exactly once, through its listener; its
operands and the space for its results stay held until no worker can touch them any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from typing import TYPE_CHECKING, Final, Protocol

from gemmserve_kernels import KernelError
from gemmserve_service.errors import (
    Description,
    Draining,
    JobCancelled,
    JobFailed,
    JobTimeout,
    NotReady,
    ServiceError,
    describe,
)
from gemmserve_service.executor.protocol import Cancel, Done, Failed, Forget, RunBatch
from gemmserve_service.scheduling.admission import Admission
from gemmserve_service.scheduling.deadlines import Deadlines
from gemmserve_service.scheduling.estimates import Estimates, device_seconds
from gemmserve_service.scheduling.fair_queue import FairQueue
from gemmserve_service.scheduling.placement import Placement
from gemmserve_service.scheduling.retries import last_loss, losses
from gemmserve_service.scheduling.tasks import plan_of
from gemmserve_service.scheduling.watchdog import Watchdog
from gemmserve_service.scheduling.write_back import WriteBack, failure_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gemmserve_kernels import Plan
    from gemmserve_service.executor.port import Executor, Worker
    from gemmserve_service.executor.protocol import Work, Written
    from gemmserve_service.programs import Problem
    from gemmserve_service.scheduling.tasks import Task
    from gemmserve_service.settings import Settings
    from gemmserve_service.store.array_store import ArrayStore

_MAX_SAMPLED: Final = 1 << 28  # bytes of a product that is checked unasked: a fraction of a second
_CHECK_RATE: Final = 1e8  # bytes a second that a check gets through at least (docs/reliability.md)


class Sized(Protocol):
    """A problem, as far as the queue's limits look at it."""

    def nbytes(self) -> int:
        """Bytes of operands and results."""


class Scheduler:
    """The queue in memory and the workers' bookkeeping; the executor reports to it (`ExecutorOwner`)."""

    def __init__(self, settings: Settings, store: ArrayStore, executor: Executor) -> None:
        self.settings = settings
        self.executor = executor
        self.draining = False
        self.queue = FairQueue()
        self.quotas = store.quotas
        self.admissions = Admission(settings, self.queue, self.quotas)
        self.estimates = Estimates()
        self.deadlines = Deadlines(self._expire)
        self.placement = Placement(executor, self.estimates, self._dispatch)
        self.writes = WriteBack(store, executor, self.submit, self.cancel)
        """Pending results: on a device, and not in the store yet."""
        self.watchdog = Watchdog(executor, silence_s=settings.heartbeat_timeout_s, hang_s=settings.hang_s)
        self._sequence = itertools.count()
        self._idle = asyncio.Event()
        self._dispatching = False
        """Whether `_dispatch` is about to be called."""
        self._chance = random.Random()  # noqa: S311 (whom to check is no secret)
        self._lost_workers: dict[str, tuple[list[str], float]] = {}
        """Owners of the tasks that a lost worker had, and since when it is gone, by worker."""
        self.group_sent: Callable[[int], None] = lambda _: None
        """Callback for the number of products that a worker was sent together."""
        store.on_extent_destroyed(lambda extent: self._forget(Forget(extents=[extent])))
        store.on_array_gone(self._forget_array)

    # -- admission --------------------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Tasks that wait."""
        return len(self.queue)

    @property
    def running(self) -> int:
        """Tasks that a worker has."""
        return sum(len(worker.tasks) for worker in self.executor.workers())

    @contextlib.contextmanager
    def admission(self, owner: str = "") -> Iterator[Callable[[Sized], None]]:
        """A place in the queue for a task that is being prepared; yields what claims room for its problem's bytes.

        Raises Draining, NotReady or QueueFull; the claim QueueFull.
        """
        if self.draining:
            raise self._draining()
        if not any(worker.spec for worker in self.executor.workers()):
            raise NotReady("no worker has answered a verified product yet", retry_after_s=1.0)
        with self.admissions.place(owner) as claim:
            yield lambda problem: claim(problem.nbytes())

    def check_admission(self, problem: Sized, owner: str = "") -> None:
        """Raise what `admission` and its claim raise, for a task that is queued in the same turn of the event loop."""
        if self.draining:
            raise self._draining()
        if not any(worker.spec for worker in self.executor.workers()):
            raise NotReady("no worker has answered a verified product yet", retry_after_s=1.0)
        self.admissions.check(owner, problem.nbytes())

    def check(self, problem: Problem) -> dict[str, Plan | KernelError]:
        """`Task.plans` for every device that is known. Raises the KernelError of one if none can run the problem."""
        plans = {worker.id: plan_of(problem, worker.spec) for worker in self.executor.workers() if worker.spec}
        errors = [found for found in plans.values() if isinstance(found, KernelError)]
        if errors and len(errors) == len(plans):
            raise errors[0]
        return plans

    def stalled(self) -> list[str]:
        """Return why nothing gets on though tasks wait: all workers stand still. Empty where one gets on, or there is
        none.
        """
        if not self.queue:
            return []
        reasons = [self.watchdog.stalled(worker) for worker in self.executor.workers() if worker.ready]
        found = [reason for reason in reasons if reason is not None]
        return found if len(found) == len(reasons) else []

    def submit(self, task: Task, *, soon: bool = False) -> None:
        """Queues an admitted task; ends it if the server began to drain while it was prepared and nothing keeps it.

        `soon`: an idle worker is sent it when whatever else has come in meanwhile is queued too, in this turn of the
        event loop: not later, but in company.
        """
        if self.draining and not task.durable:
            self._drop(task, self._draining())
            return
        task.order = (-task.priority, next(self._sequence))
        task.cost_s = min((self.estimates.seconds(task, worker) for worker in self.executor.workers()), default=0.0)
        if task.timeout_s is not None:
            task.deadline = self.deadlines.add(task, task.submitted + task.timeout_s - time.monotonic())
        self.queue.push(task)
        if task.operands:
            self.writes.request_operands(task, lambda worker: self.placement.able(task, worker))
        if not soon:
            self._dispatch()
        elif not self._dispatching:
            self._dispatching = True
            asyncio.get_running_loop().call_soon(self._dispatch_now)

    def cancel(self, task: Task) -> None:
        """Ends a task with JobCancelled: a queued one is never run, a running one's worker stops at its next panel."""
        self._drop(task, JobCancelled("the job was cancelled"))

    # -- shutting down ----------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Admit and start nothing new. Tasks of one request end with Draining; durable ones stay queued."""
        self.draining = True
        for task in self.queue:
            if not task.durable:
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
        """End tasks of single requests with Draining; no deadline fires after this."""
        self.draining = True
        for task in [*self.queue, *self._wanted()]:
            if not task.durable:
                self._drop(task, self._draining())
        self.deadlines.stop()

    # -- ExecutorOwner ----------------------------------------------------------------------------------------------

    def worker_ready(self, worker: Worker) -> None:
        """Called when a worker takes tasks from now on; its device may be another than before."""
        for task in self.queue:
            task.plans.pop(worker.id, None)
        lost = self._lost_workers.pop(worker.id, None)
        if lost is not None:  # the owners of those tasks are charged with the time without the device
            owners, since = lost
            for owner in owners:
                self.queue.charge(owner, (time.monotonic() - since) / len(owners))
        self._dispatch()

    def worker_lost(self, worker: Worker) -> None:
        """Queue a lost worker's tasks again, in their old places; after `max_attempts` losses one fails. A task that
        stood still is queued once more, behind all that its owner has waiting.

        What the device alone had is computed again.
        """
        self.writes.worker_lost(worker)
        tasks = list(worker.tasks.values())
        worker.tasks.clear()
        now = time.monotonic()
        if tasks:
            self._lost_workers[worker.id] = ([task.owner for task in tasks], now)
        for task in sorted(tasks, key=lambda task: task.stalled):
            # Which one of them it was at is not known.
            self._settle_cost(task, _since(task, worker) / len(tasks))
            task.worker = None
            task.crashes = losses(task, self.settings.max_attempts)
            if task.stalled:  # others come before it by the time that it is charged with
                task.order = (self._last_place(task), next(self._sequence))
            if task.over:
                task.close(reusable=False)
            elif (error := last_loss(task, self.settings.max_attempts)) is not None:
                self._end(task, error)
                task.close(reusable=False)
            elif self.draining and not task.durable:
                self._end(task, self._draining())
                task.close(reusable=False)
            else:
                task.listener.requeued(task)
                self.queue.push(task)
        self._settle()

    def task_ended(self, worker: Worker, answer: Done | Failed) -> None:
        """Called when a worker answered a task."""
        worker.memory_used = answer.memory_used if isinstance(answer, Done) else worker.memory_used
        task: Task | None = worker.tasks.pop(answer.task, None)
        if task is None:
            return
        if isinstance(answer, Done) and not answer.written:
            self.writes.track(task, worker, answer.algorithm)
        task.worker = None
        self.admissions.ended()
        if isinstance(answer, Done):
            self.estimates.learn(task, worker, answer.timings)
            self._settle_cost(task, device_seconds(answer.timings))
        else:
            self._settle_cost(task, _since(task, worker))
        worker.ended()
        if task.over and task.pending is not None:
            self.writes.abandon(task)
        elif task.over:
            task.close()
        elif isinstance(answer, Done):
            # What the worker says it waited for is what went before it in its group.
            answer.timings.queue_s += task.queue_s
            self._end(task, answer)
        else:
            description = Description(answer.slug, answer.status, answer.title, answer.detail, extra=answer.extra)
            self._end(task, JobFailed(description))
            task.close()
        self._settle()

    def results_written(self, worker: Worker, message: Written) -> None:
        """Called when a worker has written results, or lost them: tasks may have waited for them."""
        self.writes.written(worker, message)
        self._dispatch()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _draining(self) -> Draining:
        return Draining("the server is shutting down", retry_after_s=self.settings.drain_s)

    def _wanted(self) -> list[Task]:
        return [task for worker in self.executor.workers() for task in worker.tasks.values() if not task.over]

    def _last_place(self, task: Task) -> int:
        """The first part of an `order` that is behind all tasks of the same owner that wait, whatever their priority.

        What comes later with a priority as low is behind it in turn: it does not wait for ever.
        """
        return max((other.order[0] for other in self.queue if other.owner == task.owner), default=task.order[0])

    def _dispatch(self) -> None:
        """Gives every idle worker the first task that its device can run, and short ones that follow it.

        Then those that run several at once what they are to begin with meanwhile.
        """
        if self.draining or not self.queue:
            return
        for worker in self.executor.workers():
            between = self.placement.interleaves(worker)
            if worker.ready and self.queue and (between or not worker.tasks):
                task = self._take(worker, between=between)
                if task is not None:
                    self._send(worker, [task] if between else [task, *self._companions(task, worker)])
        for worker in self.executor.workers():
            while self.queue and self.placement.runs_ahead(worker):
                task = self._take(worker, ahead=True)
                if task is None:
                    break
                self._send(worker, [task, *self._companions(task, worker)])

    def _dispatch_now(self) -> None:
        self._dispatching = False
        self._dispatch()

    def _companions(self, task: Task, worker: Worker) -> list[Task]:
        most = self.settings.max_grouped_jobs
        return self.placement.companions(task, worker, self.queue, most, self.writes.usable)

    def _take(self, worker: Worker, *, between: bool = False, ahead: bool = False) -> Task | None:
        failed: list[tuple[Task, JobFailed]] = []

        def runs(task: Task) -> bool:
            if between and not self.placement.may_interleave(task, worker):
                return False
            if ahead and task.crashes:
                return False
            if not self.writes.usable(task, worker):
                if (failure := failure_of(task)) is not None:
                    failed.append((task, failure))
                return False
            if self.placement.able(task, worker):
                return not self.placement.better_elsewhere(task, worker)
            plans = [task.plans.get(other.id) for other in self.executor.workers()]
            if all(isinstance(plan, KernelError) for plan in plans):  # admitted by a server that had another device
                failed.append((task, JobFailed(describe(next(e for e in plans if isinstance(e, KernelError))))))
            return False

        found = self.queue.take(runs, heads=between, first=ahead)
        for task, failure in failed:
            self._drop(task, failure)
        if failed and found is None and not self._dispatching:  # others may have waited for what these would have made
            self._dispatching = True
            asyncio.get_running_loop().call_soon(self._dispatch_now)
        return found

    def _send(self, worker: Worker, tasks: list[Task]) -> None:
        grouped = len(tasks) > 1 or bool(worker.tasks)
        works, products = [], 0
        for task in tasks:
            works.append(self._begin(worker, task, grouped=grouped))
            products += task.products
        worker.began()
        self.executor.send(worker, RunBatch(tasks=works))
        self.group_sent(products)
        for task in tasks:
            task.listener.started(task)

    def _begin(self, worker: Worker, task: Task, *, grouped: bool) -> Work:
        task.attempt += 1
        task.worker = worker
        task.grouped = grouped
        task.began = time.monotonic()
        task.queue_s = task.began - task.submitted
        sampled = not task.recomputes and task.check_bytes <= _MAX_SAMPLED
        sampled = sampled and self._chance.random() < self.settings.verify_share
        verify = task.verify or sampled
        check_s = task.check_bytes / _CHECK_RATE if verify else 0.0
        task.expected_s = self.estimates.cautious_seconds(task, worker) + check_s
        task.limit_s = self.settings.hang_s + self.settings.hang_factor * task.expected_s
        task.stalled = False
        worker.tasks[task.id] = task
        chosen = task.plans[worker.id]
        assert not isinstance(chosen, KernelError)  # _take saw to it
        return task.message(chosen, verify=verify)

    def _expire(self, task: Task) -> None:
        self._drop(task, JobTimeout(f"the deadline of {task.timeout_s:g} s passed"))

    def _drop(self, task: Task, error: ServiceError) -> None:
        """Ends a task that has not ended; a worker that is at it stops as soon as it can."""
        if task.over:
            return
        self._end(task, error)
        if task.worker is None:
            task.close()
            return
        self.executor.send(task.worker, Cancel(task=task.id))
        if not self._wanted():
            self._idle.set()

    def _end(self, task: Task, outcome: Done | ServiceError) -> None:
        task.over = True
        self.queue.discard(task)
        if task.deadline is not None:
            self.deadlines.cancel(task.deadline)
        task.listener.ended(task, outcome)

    def _settle_cost(self, task: Task, seconds: float) -> None:
        """Sets right what its owner was charged with when it was sent."""
        self.queue.charge(task.owner, seconds - task.cost_s)
        self.quotas.charge_device(task.owner, seconds, durable=task.durable)

    def _settle(self) -> None:
        self._dispatch()
        if not any(worker.tasks for worker in self.executor.workers()):
            self.queue.rest()
        if not self._idle.is_set() and not self._wanted():
            self._idle.set()

    def _forget_array(self, array: str) -> None:
        for worker in self.executor.workers():
            worker.resident.discard(array)
        self._forget(Forget(arrays=[array]))

    def _forget(self, message: Forget) -> None:
        if any(worker.ready for worker in self.executor.workers()):
            self.executor.forget(message)


def _since(task: Task, worker: Worker) -> float:
    """Seconds since the worker began with a task: was sent it or, in a group, was through with the one before."""
    return time.monotonic() - (max(task.began, worker.answered) if task.grouped else task.began)
