"""Which tasks go to a worker together: short ones that waited, in the order in which they would have gone one by one.

Nobody waits for company: a task that finds a worker idle goes at once, and a group is what gathered while the worker
was busy. It is bounded by number, bytes and time, so that whoever comes next waits little longer than for one task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_service.scheduling.fair_queue import FairQueue
    from gemmserve_service.scheduling.tasks import Task

_MOST_S: Final = 0.01  # of a group: so long does somebody wait at most who comes when it has just gone
_MOST_BYTES: Final = 64 << 20  # of a group's operands and results; no measurement behind the figure


def companions(first: Task, queue: FairQueue, most: int, seconds: Callable[[Task], float]) -> list[Task]:
    """Takes out of the queue what goes with `first`: the next tasks, as long as they are short; `most` in all.

    `seconds`: a task's estimated time on the worker in question, infinite if it cannot run it. A task that has lost a
    worker before goes alone: should it be the one that kills them, it takes nobody along. A batch is a group itself.
    """
    found: list[Task] = []
    if first.crashes or first.products > 1:
        return found
    left_s = _MOST_S - seconds(first)
    left_bytes = _MOST_BYTES - first.size[0]

    cost_s = 0.0  # of the task that was asked about last

    def fits(task: Task) -> bool:
        nonlocal cost_s
        if task.crashes or task.products > 1 or task.size[0] > left_bytes:
            return False
        cost_s = seconds(task)
        return cost_s <= left_s

    while left_s > 0 and left_bytes >= 0 and len(found) + 1 < most:
        task = queue.take(fits, first=True)
        if task is None:
            break
        found.append(task)
        left_s -= cost_s
        left_bytes -= task.size[0]
    return found
