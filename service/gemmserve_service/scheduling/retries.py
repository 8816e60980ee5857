"""Rule by which a task whose worker was lost runs again, or fails. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemmserve_service.errors import WorkerCrashed

if TYPE_CHECKING:
    from gemmserve_service.scheduling.tasks import Task


def losses(task: Task, max_attempts: int) -> int:
    """Return how many workers the task has lost, with the one that is lost now.

    A task whose worker lived and did not get on would hardly do otherwise the next time: it has one more try.
    """
    count = task.crashes + 1
    return max(count, max_attempts - 1) if task.stalled else count


def last_loss(task: Task, max_attempts: int) -> WorkerCrashed | None:
    """Return the error of a task that has lost as many workers as it may; None: it is queued again."""
    if task.crashes < max_attempts:
        return None
    if task.stalled:
        return WorkerCrashed(f"its worker did not get on with it, in attempt {task.attempt}, which was the last")
    return WorkerCrashed(f"{min(task.crashes, task.attempt)} workers died or hung while they had this job")
