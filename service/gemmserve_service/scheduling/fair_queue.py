"""Fair queue of tasks: start-time fair queuing between owners, and between the service classes of one owner.

Each owner's tasks form a flow. A flow's tag is the device time that it has had, divided by its weight; the flow with
the lowest tag goes next, and one that comes back after a pause starts at the virtual time, which is the tag of the task
sent last: it gets neither credit for having been away nor a penalty for having been alone. However many tasks an owner
queues, another's single one waits for one task of each competing owner at most, beside what runs already.

Within a flow the highest priority goes first; of equal ones the service classes share the owner's device time in the
same way (`_SHARES`), each in order of arrival. So a short task overtakes the bulk of its owner's work, and whatever
comes of short ones, bulk that waits gets its share. Of short tasks, prompt ones go before the others, by two for one:
what takes most of their time is the same for all of them, and no device's.

Goyal, Vin, Cheng, "Start-time Fair Queuing: A Scheduling Algorithm for Integrated Services Packet Switching Networks",
SIGCOMM 1996; with several devices at work at once it is SFQ(D) of Jin, Chase, Kaur, "Interposed Proportional Sharing
for a Storage Service Utility", SIGMETRICS 2004. There a request's cost is known when it is sent; here it is an
estimate, set right (`charge`) when the device time is known.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from gemmserve_service.scheduling.tasks import ALL_CLASSES, SHORT_CLASSES, ServiceClass

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from gemmserve_service.scheduling.tasks import Task

_MAX_ENDED: Final = 256  # entries of ended tasks that a line may hold beside as many as wait
_MAX_IDLE: Final = 1024  # flows without tasks that are remembered for what they owe
_MIN_WEIGHT: Final = 1e-6
_MAX_PASSED: Final = 16  # tasks of an owner that others pass in one call where some block; no measurement behind it
_SHARES: Final = {
    ServiceClass.PROMPT: 0.6,
    ServiceClass.EXPRESS: 0.6,
    ServiceClass.INTERACTIVE: 0.2,
    ServiceClass.BULK: 0.2,
    ServiceClass.LARGE: 0.2,
}
"""Parts, in proportion, of an owner's device time for the classes of which tasks wait; no measurement behind them.
Prompt tasks have theirs with the express ones."""
_PROMPTS: Final = 2
"""Prompt tasks that go before an express one that waits; no measurement behind it."""
_BURST_S: Final = 0.05
"""Device time by which express tasks may be ahead of what their owner's share, and those of their class, come to."""


_MAX_RESTED: Final = 8  # flows that are kept when nothing waits: to make one takes as long as to queue a task


@dataclass(eq=False, slots=True)
class _Line:
    """The tasks of one class of an owner."""

    tag: float = 0.0
    waiting: int = 0
    heap: list[tuple[tuple[int, int], Task]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Flow:
    owner: str
    tag: float
    weight: float
    waiting: int = 0
    nbytes: int = 0
    virtual: float = 0.0
    """Tag of the line of the task that was sent last."""
    prompts: int = 0
    """Prompt tasks that have gone before the express one that is next."""
    lines: tuple[_Line, ...] = field(default_factory=lambda: tuple(_Line() for _ in ALL_CLASSES))
    """Its lines, by class."""
    arrivals: list[Task] = field(default_factory=list)
    """Its tasks by the time of their submission; some that wait no more among them."""
    stamp: int = 0
    """Stamp of its valid entry in the heap of flows."""

    def rest(self) -> None:
        """Forget what its tasks have had; none waits."""
        self.tag = self.virtual = 0.0
        self.stamp = self.prompts = 0
        for line in self.lines:
            line.tag = 0.0

    def tagged(self, service_class: ServiceClass) -> _Line:
        """Return the line whose tag is that of a class: prompt and express tasks have one together."""
        return self.lines[ServiceClass.EXPRESS if service_class is ServiceClass.PROMPT else service_class]

    @property
    def has_short(self) -> bool:
        """Whether prompt or express tasks wait."""
        return self.lines[ServiceClass.PROMPT].waiting + self.lines[ServiceClass.EXPRESS].waiting > 0


class FairQueue:
    """The tasks that wait. `weight_of(owner)` is asked when an owner's first task comes: shares are in proportion."""

    def __init__(self) -> None:
        self.weight_of: Callable[[str], float] = lambda _: 1.0
        self.nbytes = 0
        """`queued_bytes` of all that wait, but for those of large products that have begun."""
        self.prompts = 0
        """Prompt tasks that wait."""
        self._tasks: dict[Task, int] = {}
        """Those that wait, with the bytes that count."""
        self._flows: dict[str, _Flow] = {}
        self._heap: list[tuple[float, int, _Flow]] = []
        self._virtual = 0.0
        self._stamps = itertools.count(1)

    def __len__(self) -> int:
        """Tasks that wait."""
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        """Iterate over all tasks, in no order."""
        return iter(tuple(self._tasks))

    def __contains__(self, task: object) -> bool:
        """Whether it waits."""
        return task in self._tasks

    def waiting(self, owner: str) -> int:
        """Tasks of one owner."""
        flow = self._flows.get(owner)
        return 0 if flow is None else flow.waiting

    def waiting_bytes(self, owner: str) -> int:
        """Bytes of one owner's tasks."""
        flow = self._flows.get(owner)
        return 0 if flow is None else flow.nbytes

    def oldest(self, owner: str) -> float | None:
        """Time at which that task of an owner was submitted that has waited longest (time.monotonic); None: none waits.

        Takes no longer with many tasks, but for those that have gone since this was asked last.
        """
        flow = self._flows.get(owner)
        if flow is None or not flow.waiting:
            return None
        gone = next(place for place, task in enumerate(flow.arrivals) if task in self._tasks)
        del flow.arrivals[:gone]
        return flow.arrivals[0].submitted

    def waiting_owners(self) -> Iterator[str]:
        """Yield the owners that have tasks here."""
        return (flow.owner for flow in self._flows.values() if flow.waiting)

    @property
    def owners(self) -> int:
        """Owners that have tasks here."""
        return sum(flow.waiting > 0 for flow in self._flows.values())

    def push(self, task: Task) -> None:
        """Queues a task, in the place that its class and `order` give it among its owner's."""
        flow = self._flow(task.owner)
        if not flow.waiting:
            flow.tag = max(flow.tag, self._virtual)
            flow.weight = max(self.weight_of(task.owner), _MIN_WEIGHT)
        line, tagged = flow.lines[task.service_class], flow.tagged(task.service_class)
        if not (flow.has_short if task.service_class in SHORT_CLASSES else line.waiting):
            tagged.tag = max(tagged.tag, flow.virtual)
        nbytes = 0 if task.blocks is not None and task.blocks.begun else task.queued_bytes
        self._tasks[task] = nbytes
        flow.waiting += 1
        line.waiting += 1
        flow.nbytes += nbytes
        self.nbytes += nbytes
        self.prompts += task.service_class is ServiceClass.PROMPT
        if len(line.heap) > 2 * line.waiting + _MAX_ENDED:  # mostly tasks that ended while they waited
            line.heap = [entry for entry in line.heap if entry[1] in self._tasks and entry[1] is not task]
            heapq.heapify(line.heap)
        heapq.heappush(line.heap, (task.order, task))
        arrivals = flow.arrivals
        if len(arrivals) > 2 * flow.waiting + _MAX_ENDED:
            arrivals[:] = [other for other in arrivals if other in self._tasks and other is not task]
        if arrivals and task.submitted < arrivals[-1].submitted:
            bisect.insort(arrivals, task, key=attrgetter("submitted"))
        else:
            arrivals.append(task)
        if flow.waiting == 1:
            self._rank(flow)

    def discard(self, task: Task) -> None:
        """Takes a task out that waits, or does nothing."""
        if task in self._tasks:
            flow = self._flows[task.owner]
            line = flow.lines[task.service_class]
            nbytes = self._tasks.pop(task)
            flow.waiting -= 1
            line.waiting -= 1
            flow.nbytes -= nbytes
            self.nbytes -= nbytes
            self.prompts -= task.service_class is ServiceClass.PROMPT
            if not line.waiting:
                line.heap.clear()
            if not flow.waiting:
                flow.stamp = 0
                flow.arrivals.clear()

    def take(
        self,
        runs: Callable[[Task], bool],
        *,
        blocks: Callable[[Task], bool] | None = None,
        heads: bool = False,
        classes: Collection[ServiceClass] = ALL_CLASSES,
        beside: Collection[str] = (),
    ) -> Task | None:
        """Takes the next task of `classes` out for which `runs` is true, and charges its owner with its estimated cost.

        `runs` is asked about tasks in order, and must not change the queue. `blocks` is asked about those for which it
        is false: whether none behind that one may be taken in its stead; with `heads`, none of its owner's. Express
        tasks that are taken for themselves are no further ahead of others than `_BURST_S`, and leave those of higher
        priority before them; nor are others further ahead of the express tasks of the owners `beside`. Prompt ones that
        are taken for themselves do not count among the two for one.
        """
        passed: list[_Flow] = []
        found: Task | None = None
        limit = self._express_tag(beside) if beside else math.inf
        blocked = False
        alone = ServiceClass.BULK not in classes
        while self._heap and found is None and not blocked:
            _, stamp, flow = heapq.heappop(self._heap)
            if stamp != flow.stamp:
                continue
            passed.append(flow)
            if flow.tag > limit + _BURST_S:
                break
            if alone and any(flow.lines[each].waiting for each in ALL_CLASSES if each not in classes):
                limit = min(limit, flow.tag)
            found, blocked = self._first(flow, runs, blocks, classes)
            blocked = blocked and not heads
        if found is not None:
            flow = passed[-1]
            self.discard(found)
            tagged = flow.tagged(found.service_class)
            self._virtual = max(self._virtual, flow.tag)
            flow.virtual = max(flow.virtual, tagged.tag)
            flow.tag += found.cost_s / flow.weight
            tagged.tag += found.cost_s / _SHARES[found.service_class]
            if ServiceClass.EXPRESS in classes and found.service_class in SHORT_CLASSES:
                before = found.service_class is ServiceClass.PROMPT and flow.lines[ServiceClass.EXPRESS].waiting > 0
                flow.prompts = flow.prompts + 1 if before else 0
            passed.pop()
            if flow.waiting:  # in the place of the entry that was popped
                flow.stamp = next(self._stamps)
                heapq.heappush(self._heap, (flow.tag, flow.stamp, flow))
        for flow in passed:  # where they were
            if flow.waiting:
                heapq.heappush(self._heap, (flow.tag, flow.stamp, flow))
        return found

    def charge(self, owner: str, seconds: float, service_class: ServiceClass = ServiceClass.BULK) -> None:
        """Device time that the estimate did not foresee; negative where it foresaw too much."""
        flow = self._flow(owner)
        flow.tag += seconds / flow.weight
        flow.tagged(service_class).tag += seconds / _SHARES[service_class]
        if flow.waiting:
            self._rank(flow)

    def rest(self) -> None:
        """Reset every flow's tag, when nothing waits and nothing runs: the next tasks start level."""
        if not self._tasks:
            if len(self._flows) > _MAX_RESTED:
                self._flows.clear()
            for flow in self._flows.values():
                flow.rest()
            self._heap.clear()
            self._virtual = 0.0

    def _express_tag(self, owners: Collection[str]) -> float:
        """Return the lowest tag of those owners that have express tasks here."""
        flows = (flow for owner in owners if (flow := self._flows.get(owner)) is not None)
        return min((flow.tag for flow in flows if flow.has_short), default=math.inf)

    def _first(
        self,
        flow: _Flow,
        runs: Callable[[Task], bool],
        blocks: Callable[[Task], bool] | None,
        classes: Collection[ServiceClass],
    ) -> tuple[Task | None, bool]:
        """Take the flow's first task that runs out of its line; return it, and whether another one blocks."""
        passed: list[tuple[_Line, tuple[tuple[int, int], Task]]] = []
        found: Task | None = None
        blocked = False
        while found is None and not blocked and (blocks is None or len(passed) < _MAX_PASSED):
            line = self._next(flow, classes)
            if line is None:  # there is none left, or those left have had more than their share
                blocked = blocks is not None and any(flow.lines[each].heap for each in classes)
                break
            entry = heapq.heappop(line.heap)
            if runs(entry[1]):
                found = entry[1]
            else:
                passed.append((line, entry))
                blocked = blocks is not None and blocks(entry[1])
        for line, entry in passed:
            heapq.heappush(line.heap, entry)
        return found, blocked

    def _next(self, flow: _Flow, classes: Collection[ServiceClass]) -> _Line | None:
        """Return the line whose first task goes next; None: none has any, or express ones have had more than theirs."""
        every = classes is ALL_CLASSES or ServiceClass.BULK not in classes
        first: ServiceClass | None = None
        best = (0, 0.0, 0)
        for each in ALL_CLASSES:
            heap = flow.lines[each].heap
            if not heap:
                continue
            while heap and heap[0][1] not in self._tasks:
                heapq.heappop(heap)
            if heap and (every or each in classes):
                short = each in SHORT_CLASSES
                tag = flow.tagged(each).tag - (_BURST_S if short else 0.0)
                late = each is ServiceClass.PROMPT and flow.prompts >= _PROMPTS and ServiceClass.EXPRESS in classes
                rank = heap[0][0][0], tag, int(late)
                if first is None or rank < best:
                    first, best = each, rank
        return flow.lines[first] if first is not None and first in classes else None

    def _flow(self, owner: str) -> _Flow:
        flow = self._flows.get(owner)
        if flow is None:
            if len(self._flows) > 2 * self.owners + _MAX_IDLE:
                self._flows = {name: old for name, old in self._flows.items() if old.waiting or old.tag > self._virtual}
            flow = self._flows[owner] = _Flow(owner, self._virtual, max(self.weight_of(owner), _MIN_WEIGHT))
        return flow

    def _rank(self, flow: _Flow) -> None:
        """Enters the flow under its tag; an older entry of it counts no more."""
        flow.stamp = next(self._stamps)
        heapq.heappush(self._heap, (flow.tag, flow.stamp, flow))
        if len(self._heap) > 2 * len(self._flows) + _MAX_ENDED:
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].stamp]
            heapq.heapify(self._heap)
