"""Scheduler: the task that runs next, and where; fair shares between owners, one task at a time on each worker.

Where a worker computes in panels, a short task may pass between those of a long one, so that nobody waits for minutes.
A task that finds a worker idle is sent at once. What has gathered meanwhile, and is short, goes as one group, in the
order in which it would have gone one by one: a worker that has a hundred small products to do waits for the front once.

Everything here happens in the event loop's thread. A task is told of its fate exactly once, through its listener; its
operands and the space for its results stay held until no worker can touch them any more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from gemmserve_kernels import KernelError
from gemmserve_kernels.blocks.grid import GridRule
from gemmserve_service.errors import (
    Description,
    Draining,
    JobCancelled,
    JobFailed,
    JobTimeout,
    NotReady,
    ServiceError,
    StoreFull,
    describe,
)
from gemmserve_service.executor.protocol import Cancel, Done, Failed, Forget, RunBatch, Written
from gemmserve_service.programs import Program
from gemmserve_service.scheduling.admission import Admission
from gemmserve_service.scheduling.blocks.blocks import Blocks, BlockTask
from gemmserve_service.scheduling.blocks.dispatch import BlockDispatch
from gemmserve_service.scheduling.deadlines import Deadlines
from gemmserve_service.scheduling.estimates import Estimates
from gemmserve_service.scheduling.fair_queue import FairQueue
from gemmserve_service.scheduling.fleet import Fleet
from gemmserve_service.scheduling.links import Links
from gemmserve_service.scheduling.placement import Placement
from gemmserve_service.scheduling.results.deliveries import Deliveries
from gemmserve_service.scheduling.results.write_back import WriteBack, failure_of
from gemmserve_service.scheduling.retries import last_loss, losses
from gemmserve_service.scheduling.tasks import (
    ALL_CLASSES,
    SHORT_CLASSES,
    ServiceClass,
    deferrable,
    load_plans,
    plan_of,
    refusal,
)
from gemmserve_service.scheduling.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from gemmserve_kernels import Plan
    from gemmserve_service.executor.port import Executor, Worker
    from gemmserve_service.executor.protocol import Compiling, Delivered, Kept, Work
    from gemmserve_service.programs import Problem
    from gemmserve_service.runtime.tracing.spans import ProductTrace
    from gemmserve_service.scheduling.admission import Places
    from gemmserve_service.scheduling.tasks import Task
    from gemmserve_service.schemas import GemmParams, GemmReduceParams, ProgramParams
    from gemmserve_service.settings import Settings
    from gemmserve_service.store.array_store import ArrayStore
    from gemmserve_service.store.pin import Pinned

_MAX_SAMPLED: Final = 1 << 28  # bytes of a product that is checked unasked: a fraction of a second
_ROOM_RETRY_S: Final = 1.0  # after which a task is tried again for whose results the disk had no room
_TRIES: Final = 2  # to find a task for a worker: the first one may find no room, and the second needs none
_CHECK_RATE: Final = 1e8  # bytes a second that a check gets through at least (docs/reliability.md)
_MAX_CHECKED: Final = 1024  # problems whose plans are kept
_PROMPT: Final = (ServiceClass.PROMPT,)
_LONG: Final = (ServiceClass.INTERACTIVE, ServiceClass.BULK, ServiceClass.LARGE)

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Checked:
    """Facts of a problem that was checked, for all tasks that compute it."""

    problem: Problem
    workers: Sequence[Worker]
    """The workers that its plans are for."""
    plans: dict[int, Plan | KernelError]
    models: dict[int, tuple[object, Any]] = field(default_factory=dict)
    """`Task.models` of every one."""
    size: tuple[int, int] = (0, 0)
    form: str = ""

    def share(self, task: Task) -> None:
        """Spare a task what another one has worked out: what follows from the problem alone."""
        if not self.form:
            self.size, self.form = task.size, task.form
        task.models, task.size, task.form = self.models, self.size, self.form


class Sized(Protocol):
    """A problem, as far as the queue's limits look at it."""

    def nbytes(self) -> int:
        """Bytes of operands and results."""


class Scheduler:
    """The queue in memory and the workers' bookkeeping; the executor reports to it (`ExecutorOwner`)."""

    def __init__(self, settings: Settings, store: ArrayStore, executor: Executor) -> None:
        self.settings = settings
        self.store = store
        self.executor = executor
        self.draining = False
        self.queue = FairQueue()
        self.quotas = store.quotas
        self.admissions = Admission(settings, self.queue, self.quotas)
        self.estimates = Estimates()
        self.deadlines = Deadlines(self._expire)
        self.fleet = Fleet(executor)
        self.placement = Placement(self.fleet, self.estimates, Links(settings.probe_file), self._dispatch)
        rule = GridRule(settings.block_side)
        self.blocks = BlockDispatch(rule, executor, self.fleet, self.placement, self.estimates, store, self)
        self.writes = WriteBack(store, executor, self.submit, self.cancel, self._dispatch)
        """Pending results: on a device or in the host arena, and not on disk yet."""
        self.deliveries = Deliveries(executor, self._holder)
        """Arrays that go from a device straight to a client."""
        self.watchdog = Watchdog(executor, silence_s=settings.heartbeat_timeout_s, hang_s=settings.hang_s)
        self._sequence = itertools.count()
        self._idle = asyncio.Event()
        """Set unless somebody waits for nothing to run any more."""
        self._idle.set()
        self._dispatching = False
        """Whether `_dispatch` is about to be called."""
        self._checked: dict[int, _Checked] = {}
        """Facts of problems that were checked last, by the problem's id: it is held, so nothing else has that.
        """
        self._spent: dict[tuple[str, ServiceClass], tuple[float, float]] = {}
        """Seconds by which answers of this turn were off their estimates, and seconds of devices, by owner and class:
        an owner is charged once for all answers that came together.
        """
        self._chance = random.Random()  # noqa: S311 (whom to check is no secret)
        self._gone: list[str] = []
        """Arrays that are gone in this turn of the event loop."""
        self._room_timer: asyncio.TimerHandle | None = None
        """Timer after which the disk is asked again for room for results; None: it has room, as far as is known."""
        self._suspects: set[Task] = set()
        """Tasks that have lost a worker and may wait again: they go alone."""
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
        """Tasks that a worker has, each block of a large product for itself."""
        return self.fleet.running

    @property
    def products_running(self) -> int:
        """Tasks that workers have, a large product as one, however many have blocks of it."""
        return len({task.whole for worker in self.executor.workers() for task in worker.tasks.values()})

    def admission(self, owner: str = "", tasks: int = 1) -> Places:
        """Places in the queue for tasks that are being prepared; a context manager, which gives what claims room for
        the bytes of one. Raises Draining, NotReady or QueueFull; the claim QueueFull.
        """
        self._check_open()
        return self.admissions.place(owner, tasks)

    def check_place(self, owner: str = "") -> None:
        """Raise what entering `admission` raises, for a task that is queued in the same turn of the event loop."""
        self._check_open()
        self.admissions.check_place(owner)

    def check_admission(self, problem: Sized, owner: str = "") -> None:
        """Raise what `admission` and its claim raise, for a task that is queued in the same turn of the event loop."""
        self._check_open()
        self.admissions.check(owner, problem.nbytes())

    def check(self, problem: Problem) -> dict[int, Plan | KernelError]:
        """`Task.plans` for every device that is known. Raises the KernelError of one if none can run the problem."""
        known = self._checked.get(id(problem))  # to compare problems takes longer than all the rest
        if known is not None and known.workers is self.fleet.representatives:
            return known.plans.copy()
        plans = {each.device_class: plan_of(problem, each.spec) for each in self.fleet.representatives if each.spec}
        errors = [found for found in plans.values() if isinstance(found, KernelError)]
        if errors and len(errors) == len(plans):
            raise refusal(problem, errors)
        if not isinstance(problem, Program):  # of which none comes again
            if len(self._checked) >= _MAX_CHECKED:
                self._checked.clear()
            self._checked[id(problem)] = _Checked(problem, self.fleet.representatives, plans.copy())
        return plans

    def may_defer(self, params: GemmParams | GemmReduceParams | ProgramParams, nbytes: int) -> bool:
        """Return whether some worker may keep results of so many bytes for a while: their places can wait."""
        return deferrable(params, nbytes, self.fleet.result_bytes)

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
        if task.operands and (alike := self._checked.get(id(task.problem))) is not None:
            alike.share(task)
        known = self.fleet.representatives or self.executor.workers()
        lasting = task if (blocks := self.blocks.divide(task)) is None else blocks.typical
        task.estimated(min([self.estimates.seconds(lasting, worker) for worker in known], default=0.0))
        if task.trace is not None:
            task.trace.submitted(task.submitted, task.described())
        if task.timeout_s is not None:
            task.deadline = self.deadlines.add(task, task.submitted + task.timeout_s - time.monotonic())
        self.queue.push(task)
        if task.crashes:
            self._suspects.add(task)
        if task.operands:  # a large product's are everybody's
            self.writes.request_operands(task, lambda worker: blocks is None and self.placement.able(task, worker))
        if soon:
            self._dispatch_soon()
        else:
            self._dispatch()

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
        self.fleet.ready(worker)
        if worker.spec is not None:
            load_plans(worker.spec)
        self.writes.worker_ready(worker)
        self.deliveries.worker_ready(worker)
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
        self.deliveries.worker_lost(worker)
        tasks: list[Task] = worker.lose_tasks()
        self.fleet.lost(worker, len(tasks))
        now = time.monotonic()
        if tasks:
            self._lost_workers[worker.id] = ([task.owner for task in tasks], now)
        for task in tasks:
            task.worker = None
        for task in sorted(tasks, key=lambda task: task.stalled):
            # Which one of them it was at is not known.
            self._settle_cost(task, _since(task, worker) / len(tasks))
            if task.trace is not None:
                task.trace.lost()
            task.crashes = losses(task, self.settings.max_attempts)
            if task.stalled and task.whole not in self.queue:  # others come before it by the time it is charged with
                task.whole.order = (self._last_place(task), next(self._sequence))
            if task.over:
                task.close(reusable=False)
            elif (error := last_loss(task, self.settings.max_attempts)) is not None:
                self._end(task, error)
                task.close(reusable=False)
            elif self.draining and not task.durable:
                self._end(task, self._draining())
                task.close(reusable=False)
            else:
                if task.trace is not None:
                    task.trace.requeued()
                task.listener.requeued(task)
                self._queue_again(task)
                if task.crashes:
                    self._suspects.add(task.whole)
        self._settle()

    def worker_gone(self, worker: Worker) -> None:
        """Called when a lost worker is expected no longer."""
        self.fleet.gone(worker)
        self.writes.worker_gone(worker)
        self._lost_workers.pop(worker.id, None)
        self._dispatch()

    def task_ended(self, worker: Worker, answer: Done | Failed, *, more: bool = False) -> None:
        """Called when a worker answered a task. `more`: `answers_over` follows, which finds workers something to do:
        once for all answers that came together.
        """
        worker.memory_used = answer.memory_used if isinstance(answer, Done) else worker.memory_used
        task: Task | None = worker.answers(answer.task)
        if task is None:
            return
        self.fleet.ended(worker)
        if isinstance(answer, Done) and (not answer.written or task.placeless):
            self.writes.track(task, worker, answer.algorithm)
            if answer.written:
                log.error("worker %s says that it wrote results of task %s that have no place", worker.id, task.id)
                self.writes.written(worker, Written(tasks=[], lost=[task.id]))
        task.worker = None
        if task.whole is task:
            self.admissions.ended()
        if isinstance(answer, Done):
            self._settle_cost(task, self.estimates.busy_seconds(task, worker, answer.timings))
            self.estimates.learn(task, worker, answer.timings)
        else:
            self._settle_cost(task, _since(task, worker))
        worker.ended(task)
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
        if not more:
            self._settle()

    def answers_over(self) -> None:
        """Called after the last of several answers that came together."""
        self._settle()

    def task_compiles(self, worker: Worker, message: Compiling) -> None:
        """Called when a task begins to wait for the compiler, and when it no longer does."""
        task: Task | None = worker.tasks.get(message.task)
        if task is not None and not task.over:
            task.listener.compiling(task, message.compiling)

    def task_progressed(self, worker: Worker, task: str, share: float) -> None:
        """Called when a worker says that so much of a task is done, 0 to 1."""
        found: Task | None = worker.tasks.get(task)
        if found is not None and not found.over:
            found.listener.progressed(found, share)

    def results_written(self, worker: Worker, message: Written) -> None:
        """Called when a worker has written results, or lost them: tasks may have waited for them."""
        self.writes.written(worker, message)
        self._dispatch_soon()

    def arrays_delivered(self, worker: Worker, message: Delivered) -> None:
        """Called when arrays are in clients' memory, or nothing will write there."""
        self.deliveries.answered(worker, message)

    def copies_changed(self, worker: Worker, kept: Kept) -> None:
        """Called when arrays came to a worker's device or went from there."""
        self.fleet.copies_changed(worker, kept.came, kept.went)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _holder(self, pinned: Pinned) -> Worker | None:
        """Return a worker whose device has a copy of an array, if there is one."""
        pending = pinned.pending
        return self.fleet.holder(pinned.info.id) if pending is None else self.writes.holder(pending)

    def _check_open(self) -> None:
        if self.draining:
            raise self._draining()
        if not self.fleet.representatives:
            raise NotReady("no worker has answered a verified product yet", retry_after_s=1.0)

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

        Then a short one that may pass, where that first one is long; and those that run several at once what they are
        to begin with meanwhile.
        """
        if self.draining:
            return
        looked: list[Worker] = []
        idle: list[Worker] = []
        try:
            while self.queue and (worker := self.fleet.take_open()) is not None:
                looked.append(worker)
                if not worker.tasks:
                    idle.append(worker)
                self._give_first(worker)
            for worker in idle:
                if self.queue and self.placement.interleaves(worker):
                    self._give_first(worker)
            for worker in looked if self.queue else []:
                if not worker.express:
                    self._fill(worker, ALL_CLASSES)
                else:
                    self._fill(worker, SHORT_CLASSES, express=True)
                    self._fill(worker, _LONG, {task.owner for task in worker.express_tasks.values()})
            if self.queue.prompts:
                self._let_pass()
        finally:
            for worker in looked:
                if self._has_room(worker):
                    self.fleet.open(worker)

    def _give_first(self, worker: Worker) -> None:
        """Give a worker a task if it has none, or one that passes the long one that it has."""
        between = bool(worker.tasks) and self.placement.interleaves(worker)
        if not worker.ready or (worker.tasks and not between):
            return
        for _ in range(_TRIES):
            task = self._take(worker, between=between)
            if task is None or self._send(worker, [task] if between else [task, *self._companions(task, worker)]):
                return

    def _has_room(self, worker: Worker) -> bool:
        """Whether a worker could be given something now: else not before it has answered."""
        return (
            not worker.tasks
            or self.placement.interleaves(worker)
            or self.placement.runs_ahead(worker)
            or (worker.express and self.placement.runs_ahead(worker, express=True))
        )

    def _fill(
        self,
        worker: Worker,
        classes: Collection[ServiceClass],
        beside: Collection[str] = (),
        *,
        express: bool = False,
    ) -> None:
        """Give a worker what it is to begin with meanwhile; nothing while a task waits that is to have it alone, and
        could. `beside`: owners whose express tasks it has: a device computes as many beside each long one as have been
        sent by then, few where it is very long, so that their owners would get next to nothing of it.
        """
        if not worker.ready or (self._suspects and self._suspect_waits(worker)):
            return
        refused = 0
        while refused < _TRIES and self.queue and self.placement.runs_ahead(worker, express=express):
            task = self._take(worker, ahead=True, classes=classes, beside=beside)
            if task is None:
                break
            refused += not self._send(worker, [task, *self._companions(task, worker)])

    def _let_pass(self) -> None:
        """Send prompt tasks to workers that have express ones, between which they run."""
        for worker in self.fleet.workers_here:
            while self.queue.prompts and self.placement.lets_pass(worker):
                if self._suspects and self._suspect_waits(worker):
                    break
                task = self._take(worker, ahead=True, classes=_PROMPT)
                if task is None or not self._send(worker, [task], prompt=True):
                    break

    def _suspect_waits(self, worker: Worker) -> bool:
        """Whether a task that is to have the worker alone waits, and could run there."""
        self._suspects = {task for task in self._suspects if task.crashes and task in self.queue}
        return any(self._could_run(task, worker) for task in self._suspects)

    def _could_run(self, task: Task, worker: Worker) -> bool:
        """Whether the worker could begin with a task now: its results find room, its operands are where the device can
        use them, which is able to run it. One that could not is passed by others, and is the next when it could.
        """
        return (
            not self._lacks_room(task, worker)
            and self.writes.usable(task, worker)
            and self.placement.able(task, worker)
        )

    def _lacks_room(self, task: Task, worker: Worker) -> bool:
        if task.file_made is False or self.writes.lacks_room(task, worker):
            return True
        return self._room_timer is not None and task.needs_place(worker, verify=task.verify)

    def _queue_again(self, task: Task) -> None:
        """Queue a task that was taken out, in its old place; of a block, the product that it is a part of."""
        if isinstance(task, BlockTask):
            task.blocks_of_whole.give_back(task)
        elif task.blocks is None:
            self.blocks.divide(task)  # a large one that a worker of another host had
        if task.whole not in self.queue:
            self.queue.push(task.whole)

    def dispatch_soon(self) -> None:
        """Look, in this turn of the event loop, at tasks that may have waited for operands."""
        self._dispatch_soon()

    def _dispatch_soon(self) -> None:
        if not self._dispatching:
            self._dispatching = True
            asyncio.get_running_loop().call_soon(self._dispatch_now)

    def _dispatch_now(self) -> None:
        self._dispatching = False
        self._dispatch()

    def _companions(self, task: Task, worker: Worker) -> list[Task]:
        if not self.queue or self.writes.stands(worker):  # which may have room for one, and not for all
            return []
        most = self.settings.max_grouped_jobs
        return self.placement.companions(task, worker, self.queue, most, self._could_run)

    def _take(
        self,
        worker: Worker,
        *,
        between: bool = False,
        ahead: bool = False,
        classes: Collection[ServiceClass] = ALL_CLASSES,
        beside: Collection[str] = (),
    ) -> Task | None:
        """Take the next task for a worker. `between`: one that may go between the panels of the task that it has.
        `ahead`: one that it is to begin with later.
        """
        failed: list[tuple[Task, JobFailed]] = []

        def runs(task: Task) -> bool:
            if between and not self.placement.may_interleave(task, worker):
                return False
            if ahead and task.crashes:
                return False
            if task.blocks is not None and not self.blocks.suits(task.blocks, worker):
                if (failure := self._impossible(task.blocks.typical)) is not None:
                    failed.append((task, failure))
                return False
            if self._lacks_room(task, worker):
                return False
            if not self.writes.usable(task, worker):
                if (failure := failure_of(task)) is not None:
                    failed.append((task, failure))
                return False
            if self.placement.able(task, worker):
                return not self.placement.better_elsewhere(task, worker)
            if (failure := self._impossible(task)) is not None:
                failed.append((task, failure))
            return False

        def blocks(task: Task) -> bool:
            if not between or task.blocks is not None:
                return False
            return self._could_run(task, worker) and not self.placement.better_elsewhere(task, worker)

        found = self.queue.take(
            runs, blocks=blocks if between or ahead else None, heads=between, classes=classes, beside=beside
        )
        for task, failure in failed:
            self._drop(task, failure)
        if failed and found is None:  # others may have waited for what these would have made
            self._dispatch_soon()
        if found is None or found.blocks is None:
            return found
        if worker.link is not None:  # another host's has all of it
            self.writes.give_back_places(found)
            found.blocks = None
            return found
        return self._take_block(found, found.blocks, worker)

    def _impossible(self, task: Task) -> JobFailed | None:
        """Return why no device that there is can run a task: it was admitted by a server that had another one."""
        plans = [task.plans.get(each.device_class) for each in self.fleet.representatives]
        errors = [plan for plan in plans if isinstance(plan, KernelError)]
        if self.fleet.unknown or not errors or len(errors) < len(plans):
            return None
        return JobFailed(describe(errors[0]))

    def _take_block(self, task: Task, blocks: Blocks, worker: Worker) -> Task | None:
        """Take a block of a product, which goes back to the queue while it has others. None: the device cannot compute
        it, which ends the product.
        """
        block = self.blocks.take(blocks, worker)
        if isinstance(block, KernelError):
            self._drop(task, JobFailed(describe(block)))
            return None
        if blocks.left:
            self.queue.push(task)
        if task.placeless:
            self.writes.place_ahead(task)
        return block

    def _send(self, worker: Worker, tasks: list[Task], *, prompt: bool = False) -> bool:
        """Return whether the worker was sent any: those wait on for whose results the disk has no room. `prompt`: they
        run between those that it has.
        """
        ready = [(task, verify) for task in tasks if self._placed(worker, task, verify := self._is_checked(task))]
        if not ready:
            return False
        idle = not worker.tasks
        grouped = len(ready) > 1 or not idle
        works, products = [], 0
        for task, verify in ready:
            works.append(self._begin(worker, task, grouped=grouped, verify=verify))
            products += task.products
        if idle:
            worker.began()
        self.executor.send(worker, RunBatch(tasks=works, prompt=prompt))
        self.group_sent(products)
        for task, _ in ready:
            task.listener.started(task)
        return True

    def _is_checked(self, task: Task) -> bool:
        if task.verify:
            return True
        if self._chance.random() >= self.settings.verify_share or task.recomputes or task.check_bytes > _MAX_SAMPLED:
            return False
        if task.whole.in_arena:  # what a check would put there would not come out again
            return False
        return not (self._room_timer is not None and task.placeless)  # without the place that a check needs

    def _placed(self, worker: Worker, task: Task, verify: bool) -> bool:
        """Return whether the results have the places that they need; else the task waits again, where it was."""
        if not task.needs_place(worker, verify=verify):
            return True
        if self._awaits_file(task):
            self._take_back(task)
            return False
        try:
            task.take_places()
        except (StoreFull, OSError) as error:
            log.warning("task %s waits: %s", task.id, error)
            self._take_back(task)
            self._wait_for_room()
            return False
        return True

    def _wait_for_room(self) -> None:
        """Send no task for a while that needs room on the disk. A timer's end is what ends it, not a clock's time: a
        loop's timers may come before that, and no other would.
        """
        if self._room_timer is None:
            self._room_timer = asyncio.get_running_loop().call_later(_ROOM_RETRY_S, self._look_for_room)

    def _look_for_room(self) -> None:
        self._room_timer = None
        self._dispatch()

    def _awaits_file(self, task: Task) -> bool:
        """Whether a task has to wait for a file that takes long to make, as one in memory does. Others pass it, while a
        thread makes the file, once.
        """
        whole = task.whole
        if whole.file_made:
            whole.file_made = None
            return False
        slow = next((nbytes for nbytes in task.lacking() if not self.store.brief(nbytes)), 0)
        if not slow:
            return False

        def made() -> None:
            whole.file_made = True
            self._dispatch()

        whole.file_made = False
        self.writes.make_file(slow, made)
        return True

    def _take_back(self, task: Task) -> None:
        """Queue a task that was not sent in its old place; its owner is not charged for the try."""
        self.queue.charge(task.owner, -task.cost_s, task.service_class)
        self._queue_again(task)

    def _begin(self, worker: Worker, task: Task, *, grouped: bool, verify: bool) -> Work:
        task.attempt += 1
        task.worker = worker
        task.grouped = grouped
        task.began = time.monotonic()
        task.queue_s = task.began - task.submitted
        check_s = task.check_bytes / _CHECK_RATE if verify else 0.0
        task.expected_s = self.estimates.cautious_seconds(task, worker) + check_s
        task.limit_s = self.settings.hang_s + self.settings.hang_factor * task.expected_s
        task.stalled = task.beside = False
        if task.trace is not None:
            task.trace.started(worker.id, task.began)
        worker.sent(task)
        self.fleet.began(worker)
        chosen = task.plans[worker.device_class]
        assert not isinstance(chosen, KernelError)  # _take saw to it
        work = task.message(chosen, verify=verify)
        work.attempt = task.attempt
        return work

    def _expire(self, task: Task) -> None:
        self._drop(task, JobTimeout(f"the deadline of {task.timeout_s:g} s passed"))

    def _drop(self, task: Task, error: ServiceError) -> None:
        """Ends a task that has not ended; a worker that is at it stops as soon as it can."""
        task = task.whole
        if task.over:
            return
        self._end(task, error)
        if task.blocks is not None and task.blocks.under_way:
            for block in task.blocks.under_way.values():
                block.over = True
                if block.worker is not None:
                    self.executor.send(block.worker, Cancel(task=block.id))
        elif task.worker is None:
            task.close()
            if self.queue and not self.draining:  # others may have stood behind it
                self._dispatch_soon()
            return
        if task.worker is not None:
            self.executor.send(task.worker, Cancel(task=task.id))
        if not self._idle.is_set() and not self._wanted():
            self._idle.set()

    def _end(self, task: Task, outcome: Done | ServiceError) -> None:
        task.over = True
        if task.trace is not None:
            _tell(task.trace, outcome)
        self.queue.discard(task)
        if task.deadline is not None:
            self.deadlines.cancel(task.deadline)
        task.listener.ended(task, outcome)

    def blocks_combine(self, task: Task) -> None:
        """Called when all blocks of a reduction are done: it waits for a worker that puts them together."""
        if self.draining and not task.durable:
            self._drop(task, self._draining())
        else:
            self.queue.push(task)

    def blocks_ended(self, task: Task, outcome: Done | ServiceError) -> None:
        """Called when the last block of a product is done, or one has failed."""
        self.admissions.ended()
        if isinstance(outcome, Done):
            if task.in_arena:
                self.writes.track_in_arena(task, outcome.algorithm)
            self._end(task, outcome)
        else:
            self._drop(task, outcome)

    def blocks_gone(self, task: Task) -> None:
        """Called when no worker is at a block of a product any more, and none will be: its panels are of no use."""
        self._forget(Forget(parents=[task.id]))

    def _settle_cost(self, task: Task, seconds: float) -> None:
        """Sets right what its owner was charged with when it was sent; `_settle` follows."""
        key = task.owner, task.service_class
        off_s, spent_s = self._spent.get(key, (0.0, 0.0))
        self._spent[key] = off_s + seconds - task.cost_s, spent_s + seconds

    def _settle(self) -> None:
        if self._spent:
            for (owner, service_class), (off_s, spent_s) in self._spent.items():
                self.queue.charge(owner, off_s, service_class)
                self.quotas.charge_device(owner, spent_s)
            self._spent.clear()
        self._dispatch()
        if not self.fleet.running:
            self.queue.rest()
            self.writes.rest()
        if not self._idle.is_set() and not self._wanted():
            self._idle.set()

    def _forget_array(self, array: str) -> None:
        self.fleet.forget_array(array)
        if not self._gone:
            asyncio.get_running_loop().call_soon(self._forget_gone)
        self._gone.append(array)

    def _forget_gone(self) -> None:
        """Tell workers of arrays that are gone: of all that a request has deleted at one time."""
        gone, self._gone = self._gone, []
        self._forget(Forget(arrays=gone))

    def _forget(self, message: Forget) -> None:
        if any(worker.ready for worker in self.executor.workers()):
            self.executor.forget(message)


def _tell(trace: ProductTrace, outcome: Done | ServiceError) -> None:
    if isinstance(outcome, Done):
        trace.ended(timings=outcome.timings, algorithm=outcome.algorithm)
    else:
        trace.ended(error=None if isinstance(outcome, JobCancelled) else describe(outcome).slug)


def _since(task: Task, worker: Worker) -> float:
    """Seconds since the worker began with a task: was sent it or, in a group, was through with the one before."""
    return time.monotonic() - (max(task.began, worker.answered) if task.grouped else task.began)
