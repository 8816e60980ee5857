"""Results computed again after their device was lost: by the same algorithm on the same operands, into their place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gemmserve_service.executor.protocol import Done
from gemmserve_service.programs import Program
from gemmserve_service.runtime.ids import new_id
from gemmserve_service.scheduling.tasks import Task, first_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gemmserve_service.errors import ServiceError
    from gemmserve_service.programs import Problem
    from gemmserve_service.schemas import GemmParams, GemmReduceParams, ProgramParams
    from gemmserve_service.store.extents.extents import Extent
    from gemmserve_service.store.pin import Pinned
    from gemmserve_service.store.record import ArraySpec, Record

_PRIORITY: Final = 100  # the highest: whoever waits for such an array waits for a job that has ended


@dataclass(frozen=True, slots=True)
class Lineage:
    """Lineage of results: how they were made, and the pins of what they were made of, which it owns."""

    params: GemmParams | GemmReduceParams | ProgramParams
    problem: Problem
    operands: dict[str, Pinned]
    results: dict[str, ArraySpec]
    """Each result's array, by name."""
    algorithm: str | None
    """Algorithm to compute it by; None: that of each step of a program, whatever its device takes."""
    owner: str
    verify: bool
    """Whether they are to be checked, whoever computes them."""

    @classmethod
    def of(cls, task: Task, algorithm: str) -> Lineage:
        """Return that of a task's results, computed by `algorithm`; takes the pins of its operands over, which no
        worker reads any more.
        """
        pins = {name: pinned.share() for name, pinned in task.operands.items()}
        task.unpin()
        task.operands = {}
        return cls(
            task.params,
            task.problem,
            pins,
            {name: upload.spec for name, upload in task.results.items()},
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
        records: Iterable[Record],
        place: Callable[[int], Extent],
        ended: Callable[[Done | ServiceError], None],
        closed: Callable[[bool], None],
    ) -> None:
        """`records`: the results' arrays. `place`: returns a file of so many bytes, for one that has none; raises
        StoreFull, OSError. `ended` is called with the outcome; after an error `closed` once no worker is at the task
        any more, with whether the results' place may serve others. Both in the event loop's thread.
        """
        self._ended = ended
        arrays = {record.info.id: record for record in records}
        self.task = Task(
            new_id("job"),
            lineage.params,
            lineage.problem,
            {name: pinned.share() for name, pinned in lineage.operands.items()},
            {name: _Place(spec, arrays[spec.id], place, closed) for name, spec in lineage.results.items()},  # type: ignore[misc]
            self,
            owner=lineage.owner,
            priority=_PRIORITY,
            verify=lineage.verify,
            algorithm=None if lineage.algorithm is None else first_of(lineage.algorithm),
            recomputes=True,
        )

    def started(self, task: Task) -> None:
        """Do nothing: the job whose results these are has ended."""

    def compiling(self, task: Task, compiles: bool) -> None:
        """See `scheduling.tasks.Listener`."""

    def progressed(self, task: Task, share: float) -> None:
        """Do nothing, likewise."""

    def requeued(self, task: Task) -> None:
        """Do nothing, likewise."""

    def ended(self, task: Task, outcome: Done | ServiceError) -> None:
        """Release the operands of a task that has succeeded, and pass the outcome on."""
        if isinstance(outcome, Done):
            task.unpin()
        self._ended(outcome)


class _Place:
    """A result's place in the store, given to a task like an upload: it is an array's already."""

    def __init__(
        self, spec: ArraySpec, record: Record, place: Callable[[int], Extent], closed: Callable[[bool], None]
    ) -> None:
        self.spec = spec
        self._record = record
        self._place = place
        self._closed = closed

    @property
    def extent(self) -> Extent | None:
        """The array's file; None: it has none yet."""
        return self._record.extent

    def take_place(self) -> None:
        """Take a file, if it has none. Raises StoreFull, OSError."""
        if self._record.extent is None and self.spec.nbytes:
            self._record.extent = self._place(self.spec.nbytes)

    def abort(self) -> None:
        """Called when no worker is at it."""
        self._closed(True)

    def discard(self) -> None:
        """Called when the worker was lost, and may write on for a while."""
        self._closed(False)
