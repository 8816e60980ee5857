"""Placement of tasks: on which workers one may run, on which it should, and what a busy worker may have besides.

A product whose operands a device has copies of is worth waiting for that device, but no longer than to bring them to
another one would take (delay scheduling: Zaharia et al., "Delay Scheduling: A Simple Technique for Achieving Locality
and Fairness in Cluster Scheduling", EuroSys 2010).

Short tasks that waited go to a worker together, in the order in which they would have gone one by one. A task that
finds a worker idle goes at once; a group is what gathered while the worker was busy. It is bounded by number, bytes and
time, so that whoever comes next waits little longer than for one task. A prompt task does not wait for a group: a
worker that runs several tasks at once runs it between two of those.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Final

from gemmserve_kernels import KernelError, Plan
from gemmserve_service.scheduling.tasks import ServiceClass

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from gemmserve_service.executor.port import Worker
    from gemmserve_service.scheduling.estimates import Estimates
    from gemmserve_service.scheduling.fair_queue import FairQueue
    from gemmserve_service.scheduling.fleet import Fleet
    from gemmserve_service.scheduling.links import Links
    from gemmserve_service.scheduling.tasks import Task

# A task that others may pass: two panels or more. At half a second a small product waited for whole ones of 40 ms, and
# its client's 99th percentile beside two of those a second was four times that in peace (1.3 with this).
_LONG_S: Final = 0.02
_SHORT_S: Final = 0.05  # one that may pass, for others wait for that in turn, and ...
_SHARE: Final = 0.1  # ... of the other's time: what it is delayed by; no measurement behind these two
_AHEAD_S: Final = 0.5  # of work, beyond which a worker is sent nothing more: its copies are hidden, or do not matter
_MIN_WAIT_S: Final = 1e-3  # a wait that is shorter is none
_MAX_WAIT_S: Final = 1.0
_MAX_GROUP_S: Final = 0.01  # of a group: so long does somebody wait at most who comes when it has just gone
_MAX_GROUP_BYTES: Final = 64 << 20  # that are brought and taken for a group; no measurement behind the figure
_MIN_BROUGHT_BYTES: Final = 1 << 20  # of a task's operands and results, below which nobody asks where they are
_TASK_S: Final = 2e-4  # for which a GPU's worker is at a task, however short its device's part is: 0.23 to 0.38 ms of a
# processor beside an H200
_SOON_S: Final = 2e-3  # of express tasks, below which such a worker is sent more, however many it has: an H200 that had
# four products of 1024^3 at a time was idle for nine tenths of it


class Placement:
    """`again` is called when a task has waited long enough for the device that has its operands."""

    def __init__(self, fleet: Fleet, estimates: Estimates, links: Links, again: Callable[[], object]) -> None:
        self._fleet = fleet
        self._estimates = estimates
        self._links = links
        self._again = again
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def plan(self, task: Task, worker: Worker) -> Plan | KernelError:
        """Return how that worker's device would run the task, or why it cannot."""
        if worker.device_class not in task.plans and worker.spec is not None:
            task.plans[worker.device_class] = task.plan(worker.spec)
        return task.plans[worker.device_class]

    def able(self, task: Task, worker: Worker) -> bool:
        """Whether the device can run it, in the way that the task wants if any device has that way."""
        if task.blocks is not None:
            task = task.blocks.typical
        chosen = self.plan(task, worker)
        if isinstance(chosen, KernelError):
            return False
        if task.algorithm is None or chosen.algorithm == task.algorithm:
            return True
        if self._fleet.unknown:
            return False  # that one may be it
        plans = [self.plan(task, other) for other in self._fleet.representatives]
        return not any(isinstance(plan, Plan) and plan.algorithm == task.algorithm for plan in plans)

    def better_elsewhere(self, task: Task, worker: Worker) -> bool:
        """Whether another device has more of the operands, is alive, and the task has not waited long enough for it."""
        far = worker.link is not None and self._fleet.here
        if not task.operands or not (far or self._fleet.others_have_copies(worker)) or task.blocks is not None:
            return False
        if any(pinned.pending is not None for pinned in task.operands.values()):
            return False  # no other device can compute with them
        operands = task.operands.values()
        copied = self._fleet.copied(operands, worker)
        # To this host's workers the store is at hand; what is to go to another's crosses the link first.
        most = sum([each.info.nbytes for each in operands])
        if most > copied and not far:
            most = self._fleet.most_copied(operands)
        patience_s = min((most - copied) / self._links.rate(worker), _MAX_WAIT_S)
        if patience_s < _MIN_WAIT_S:
            return False
        now = time.monotonic()
        if task.passed_over is None:
            task.passed_over = now
        until = task.passed_over + patience_s
        if until <= now:
            return False
        self._look_at(until, now)
        return True

    def _look_at(self, when: float, now: float) -> None:
        """Have waiting tasks looked at again at that time at the latest (time.monotonic). A loop's timer may come
        before it: whoever still waits then has another set.
        """
        if self._timer is not None:
            if self._timer_at <= when:
                return
            self._timer.cancel()
        self._timer_at = when
        self._timer = asyncio.get_running_loop().call_later(max(when - now, _MIN_WAIT_S), self._look)

    def _look(self) -> None:
        self._timer = None
        self._again()

    def link_seconds(self, task: Task, worker: Worker) -> float:
        """Return the seconds that operands which a worker that joined has not take to it, and results back."""
        return (self._lacking(task, worker) + _result_bytes(task)) / self._links.rate(worker)

    def companions(
        self, task: Task, worker: Worker, queue: FairQueue, most: int, could_run: Callable[[Task, Worker], bool]
    ) -> list[Task]:
        """Takes out of the queue what goes with `task`; not what another worker, which is idle, could begin with now.

        `most`: tasks in all. `could_run`: whether the worker could begin with a task now.
        """
        if not queue or most < 2:
            return []
        most = min(most, -(-(len(queue) + 1) // max(self._fleet.idle, 1)))

        own_s = _TASK_S if worker.express else 0.0

        def seconds(other: Task) -> float:
            runs = could_run(other, worker) and not self.better_elsewhere(other, worker)
            return own_s + self._estimates.seconds(other, worker) if runs else math.inf

        return _companions(task, queue, most, seconds, lambda other: self.brought_bytes(other, worker))

    def brought_bytes(self, task: Task, worker: Worker) -> int:
        """Return the bytes of operands that a worker's device has no copies of, and of results that it does not keep;
        of small tasks all bytes.
        """
        nbytes = task.size[0]
        if nbytes <= _MIN_BROUGHT_BYTES or task.blocks is not None:
            return nbytes
        return self._lacking(task, worker) + (0 if task.may_be_deferred(worker) else _result_bytes(task))

    def _lacking(self, task: Task, worker: Worker) -> int:
        """Return the bytes of operands that a worker's device has no copies of."""
        operands = task.operands.values()
        return sum([each.info.nbytes for each in operands]) - self._fleet.copied(operands, worker)

    def interleaves(self, worker: Worker) -> bool:
        """Whether the worker is at a long task, between whose panels a short one can run.

        Not if it has lost a worker before: should it be the one that kills them, it takes nobody along.
        """
        if not worker.interleaves or len(worker.tasks) != 1:
            return False
        (task,) = worker.tasks.values()
        return bool(not task.over and not task.crashes and task.cost_s >= _LONG_S)

    def may_interleave(self, task: Task, worker: Worker) -> bool:
        """Whether it is short enough for that, beside the one task that the worker has, and under no suspicion."""
        (passed,) = worker.tasks.values()
        if task.crashes or task.blocks is not None:
            return False
        return bool(self._estimates.seconds(task, worker) <= min(_SHORT_S, _SHARE * passed.cost_s))

    def runs_ahead(self, worker: Worker, *, express: bool = False) -> bool:
        """Whether the worker is to have another task before it has answered those that it has; of which kind, where it
        runs express tasks beside others.

        Not while it has one that has lost a worker, nor work for a while: what it is sent nobody can come before.
        """
        if not worker.ready or not worker.tasks or (express and not worker.express):
            return False
        count, seconds, last = 0, 0.0, None
        own_s = _TASK_S if express else 0.0
        alike: Collection[Task] = worker.tasks.values()
        if worker.express:
            others = worker.other_tasks
            if any(task.crashes for task in others):
                return False
            alike = worker.express_tasks.values() if express else others
        for task in alike:  # of which a group leaves a hundred, and a few say enough
            if task.crashes:
                return False
            count += 1
            # A block costs what its product was charged for, by what was known when that came.
            seconds += own_s + (task.cost_s if task.whole is task else self._estimates.seconds(task, worker))
            last = task
            if count > worker.ahead and not (express and seconds < _SOON_S):
                return False
        if count == 1 and last is not None and last.whole is not last:
            return True  # beneath a block of a large product, however long that is, panels of the next can come
        return seconds < _AHEAD_S

    def lets_pass(self, worker: Worker) -> bool:
        """Whether the worker, of this host, is to have a prompt task between the express ones that it has. (Through the
        agent of another host all go in order.)
        """
        if not worker.ready or not worker.express:
            return False
        if any(task.crashes for task in worker.tasks.values()):
            return False
        prompts = [task for task in worker.express_tasks.values() if task.service_class is ServiceClass.PROMPT]
        seconds = sum([_TASK_S + self._estimates.seconds(task, worker) for task in prompts])
        return len(prompts) < len(worker.express_tasks) and seconds < _SOON_S


def _result_bytes(task: Task) -> int:
    return sum([each.spec.nbytes for each in task.results.values()])


def _companions(
    first: Task, queue: FairQueue, most: int, seconds: Callable[[Task], float], brought: Callable[[Task], int]
) -> list[Task]:
    """Takes out of the queue what goes with `first`: the next tasks, as long as they are short; `most` in all.

    `seconds`: a task's estimated time on the worker in question, infinite if it cannot run it now: others pass it.
    `brought`: bytes that are brought there for it, and taken from there.
    """
    found: list[Task] = []
    if not first.may_be_grouped:
        return found
    left_s = _MAX_GROUP_S - seconds(first)
    left_bytes = _MAX_GROUP_BYTES - brought(first)

    cost_s, nbytes = 0.0, 0  # of the task that was asked about last

    def fits(task: Task) -> bool:
        nonlocal cost_s, nbytes
        cost_s, nbytes = seconds(task), brought(task)
        return cost_s <= left_s and task.may_be_grouped and nbytes <= left_bytes

    def blocks(_: Task) -> bool:
        return cost_s < math.inf

    while left_s > 0 and left_bytes >= 0 and len(found) + 1 < most:
        task = queue.take(fits, blocks=blocks)
        if task is None:
            break
        found.append(task)
        left_s -= cost_s
        left_bytes -= nbytes
    return found
