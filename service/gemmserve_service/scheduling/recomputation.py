"""Results computed again after their device was lost: by the same algorithm on the same operands, into their place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gemmserve_service.executor.protocol import Done
from gemmserve_service.programs import Program
from gemmserve_service.runtime.ids import new_id
from gemmserve_service.scheduling.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_service.errors import ServiceError
    from gemmserve_service.programs import Problem
    from gemmserve_service.schemas import GemmParams, GemmReduceParams, ProgramParams
    from gemmserve_service.store.extents.extents import Extent
    from gemmserve_service.store.pin import Pinned
    from gemmserve_service.store.record import ArraySpec

_PRIORITY: Final = 100  # the highest: whoever waits for such an array waits for a job that has ended


@dataclass(frozen=True, slots=True)
class Lineage:
    """Lineage of results: how they were made, and the pins of what they were made of, which it owns."""

    params: GemmParams | GemmReduceParams | ProgramParams
    problem: Problem
    operands: dict[str, Pinned]
    places: dict[str, tuple[ArraySpec, Extent | None]]
    """Each result's place in the store, by name."""
    algorithm: str | None
    """Algorithm to compute it by; None: that of each step of a program, whatever its device takes."""
    owner: str
    verify: bool
    """Whether they are to be checked, whoever computes them."""

    @classmethod
    def of(cls, task: Task, algorithm: str) -> Lineage:
        """Return that of a task's results, computed by `algorithm`; takes the pins of its operands over."""
        return cls(
            task.params,
            task.problem,
            task.operands,
            {name: (upload.spec, upload.extent) for name, upload in task.results.items()},
            None if isinstance(task.problem, Program) else algorithm,
            task.owner,
            task.verify,
        )

    def release(self) -> None:
        """Release the operands; idempotent."""
        for pinned in self.operands.values():
            pinned.release()


class Recomputation:
    """A task that computes results again, and its listener (`scheduler.Listener`)."""

    def __init__(
        self,
        lineage: Lineage,
        ended: Callable[[Done | ServiceError], None],
        closed: Callable[[bool], None],
    ) -> None:
        """`ended` is called with the outcome; after an error `closed` once no worker is at the task any more, with
        whether the results' place may serve others. Both in the event loop's thread.
        """
        self._ended = ended
        self.task = Task(
            new_id("job"),
            lineage.params,
            lineage.problem,
            {name: pinned.share() for name, pinned in lineage.operands.items()},
            {name: _Place(*place, closed) for name, place in lineage.places.items()},  # type: ignore[misc]
            self,
            owner=lineage.owner,
            priority=_PRIORITY,
            verify=lineage.verify,
            algorithm=lineage.algorithm,
            recomputes=True,
        )

    def started(self, task: Task) -> None:
        """Do nothing: the job whose results these are has ended."""

    def requeued(self, task: Task) -> None:
        """Do nothing, likewise."""

    def ended(self, task: Task, outcome: Done | ServiceError) -> None:
        """Release the operands of a task that has succeeded, and pass the outcome on."""
        if isinstance(outcome, Done):
            task.unpin()
        self._ended(outcome)


class _Place:
    """A result's place in the store, given to a task like an upload: it is an array's already."""

    def __init__(self, spec: ArraySpec, extent: Extent | None, closed: Callable[[bool], None]) -> None:
        self.spec = spec
        self.extent = extent
        self._closed = closed

    def abort(self) -> None:
        """Called when no worker is at it."""
        self._closed(True)

    def discard(self) -> None:
        """Called when the worker was lost, and may write on for a while."""
        self._closed(False)
