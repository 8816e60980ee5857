"""Fair queue of tasks: start-time fair queuing between owners, priority and then arrival within one.

Each owner's tasks form a flow. A flow's tag is the device time that it has had, divided by its weight; the flow with
the lowest tag goes next, and one that comes back after a pause starts at the virtual time, which is the tag of the task
sent last: it gets neither credit for having been away nor a penalty for having been alone. However many tasks an owner
queues, another's single one waits for one task of each competing owner at most, beside what runs already.

Goyal, Vin, Cheng, "Start-time Fair Queuing: A Scheduling Algorithm for Integrated Services Packet Switching Networks",
SIGCOMM 1996; with several devices at work at once it is SFQ(D) of Jin, Chase, Kaur, "Interposed Proportional Sharing
for a Storage Service Utility", SIGMETRICS 2004. There a request's cost is known when it is sent; here it is an
estimate, set right (`charge`) when the device time is known.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gemmserve_service.scheduling.tasks import Task

_MAX_ENDED: Final = 256  # entries of ended tasks that a flow may hold beside as many as wait
_MAX_IDLE: Final = 1024  # flows without tasks that are remembered for what they owe
_MIN_WEIGHT: Final = 1e-6


@dataclass(eq=False, slots=True)
class _Flow:
    owner: str
    tag: float
    weight: float
    waiting: int = 0
    nbytes: int = 0
    heap: list[tuple[tuple[int, int], Task]] = field(default_factory=list)
    stamp: int = 0
    """Stamp of its valid entry in the heap of flows."""


class FairQueue:
    """The tasks that wait. `weight_of(owner)` is asked when an owner's first task comes: shares are in proportion."""

    def __init__(self) -> None:
        self.weight_of: Callable[[str], float] = lambda _: 1.0
        self.nbytes = 0
        """Bytes of operands and results of all that wait."""
        self._tasks: set[Task] = set()
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

    @property
    def owners(self) -> int:
        """Owners that have tasks here."""
        return sum(flow.waiting > 0 for flow in self._flows.values())

    def push(self, task: Task) -> None:
        """Queues a task, in the place that its `order` gives it among its owner's."""
        flow = self._flow(task.owner)
        if not flow.waiting:
            flow.tag = max(flow.tag, self._virtual)
            flow.weight = max(self.weight_of(task.owner), _MIN_WEIGHT)
        self._tasks.add(task)
        flow.waiting += 1
        flow.nbytes += task.size[0]
        self.nbytes += task.size[0]
        if len(flow.heap) > 2 * flow.waiting + _MAX_ENDED:  # mostly tasks that ended while they waited
            flow.heap = [entry for entry in flow.heap if entry[1] in self._tasks and entry[1] is not task]
            heapq.heapify(flow.heap)
        heapq.heappush(flow.heap, (task.order, task))
        if flow.waiting == 1:
            self._rank(flow)

    def discard(self, task: Task) -> None:
        """Takes a task out that waits, or does nothing."""
        if task in self._tasks:
            flow = self._flows[task.owner]
            self._tasks.remove(task)
            flow.waiting -= 1
            flow.nbytes -= task.size[0]
            self.nbytes -= task.size[0]
            if not flow.waiting:
                flow.heap.clear()
                flow.stamp = 0

    def take(self, runs: Callable[[Task], bool], *, heads: bool = False, first: bool = False) -> Task | None:
        """Takes the next task out for which `runs` is true, and charges its owner with its estimated cost.

        `runs` is asked about tasks in order, and must not change the queue. `heads`: only about each owner's first.
        `first`: only about the very next.
        """
        passed: list[_Flow] = []
        found: Task | None = None
        while self._heap and found is None and not (first and passed):
            _, stamp, flow = heapq.heappop(self._heap)
            if stamp == flow.stamp:
                passed.append(flow)
                found = self._first(flow, runs, heads=heads or first)
        if found is not None:
            flow = passed[-1]
            self.discard(found)
            self._virtual = max(self._virtual, flow.tag)
            flow.tag += found.cost_s / flow.weight
            passed.pop()
            if flow.waiting:
                self._rank(flow)
        for flow in passed:  # where they were
            if flow.waiting:
                heapq.heappush(self._heap, (flow.tag, flow.stamp, flow))
        return found

    def charge(self, owner: str, seconds: float) -> None:
        """Device time that the estimate did not foresee; negative where it foresaw too much."""
        flow = self._flow(owner)
        flow.tag += seconds / flow.weight
        if flow.waiting:
            self._rank(flow)

    def rest(self) -> None:
        """Reset every flow's tag, when nothing waits and nothing runs: the next tasks start level."""
        if not self._tasks:
            self._flows.clear()
            self._heap.clear()
            self._virtual = 0.0

    def _first(self, flow: _Flow, runs: Callable[[Task], bool], *, heads: bool) -> Task | None:
        others: list[tuple[tuple[int, int], Task]] = []
        found: Task | None = None
        while flow.heap and found is None:
            entry = heapq.heappop(flow.heap)
            if entry[1] not in self._tasks:
                continue
            if runs(entry[1]):
                found = entry[1]
            else:
                others.append(entry)
                if heads:
                    break
        for entry in others:
            heapq.heappush(flow.heap, entry)
        return found

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
