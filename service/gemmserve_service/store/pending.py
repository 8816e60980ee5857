"""Results that a device has and the store has not, yet: who has them, and what they can be computed from again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from gemmserve_service.errors import ArrayLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_service.errors import ServiceError
    from gemmserve_service.executor.port import Worker
    from gemmserve_service.products import Problem
    from gemmserve_service.scheduling.tasks import Task
    from gemmserve_service.schemas import GemmParams, GemmReduceParams, ProgramParams
    from gemmserve_service.store.catalog import Record
    from gemmserve_service.store.extents.extents import Extent
    from gemmserve_service.store.pin import Pinned
    from gemmserve_service.store.upload import ArraySpec, Upload


class Keeper(Protocol):
    """Who looks after them (`WriteBack`)."""

    def let_go(self, unwritten: Unwritten) -> None:
        """Some result is hidden and fewer hold it than before: perhaps none of them is needed any more."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """What results were made of, and how. The operands are pinned until the results are in the store."""

    params: GemmParams | GemmReduceParams | ProgramParams
    problem: Problem
    operands: dict[str, Pinned]
    places: dict[str, tuple[ArraySpec, Extent | None]]
    """Where each result belongs, by name."""
    algorithm: str | None
    """None: that of each step of a program, whatever its device takes."""
    owner: str
    verify: bool
    """Whether they are to be checked, whoever computes them."""

    def release(self) -> None:
        """Lets the operands go; idempotent."""
        for pinned in self.operands.values():
            pinned.release()


@dataclass(eq=False)
class Unwritten:
    """The results of one job."""

    job: str
    records: list[Record] = field(default_factory=list)
    """Of its arrays, once the job's end is on record."""
    lineage: Lineage | None = None
    keeper: Keeper | None = None
    """None until the job is recovered."""
    holder: Worker | None = None
    """Whose device has them; nobody else can compute with them."""
    task: str = ""
    """By what name `holder` knows them."""
    again: Task | None = None
    """The task that computes them once more, after their device was lost."""
    error: ServiceError | None = None
    """Why they are lost for good."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once they are in the store, or lost for good."""
    arrived: bool = False
    """In the store before the job's end was on record."""
    orphaned: bool = False
    """Their device was lost before the job's end was on record."""
    late: bool = False
    """Nobody can see them: their holder was told to write others first."""
    urgent: bool = False
    """Somebody waits for them: their holder was told to write them first."""
    unneeded: bool = False
    """Nobody will ever read them: they go as soon as nobody can write to their place."""
    close: Callable[[bool], None] | None = None
    """For results that became no arrays: gives their space back. Told whether it may serve others."""

    def let_go(self) -> None:
        """Called by the store when a hidden result is held by fewer than before."""
        if self.keeper is not None:
            self.keeper.let_go(self)


class Rewritten:
    """A result of a task that computes it once more: like an upload, but the place is that of an array already."""

    def __init__(self, spec: ArraySpec, extent: Extent | None, closed: Callable[[bool], None]) -> None:
        """`closed`: called when no worker is at it any more, with whether the place may serve others."""
        self.spec = spec
        self.extent = extent
        self._closed = closed

    def abort(self) -> None:
        """No worker is at it."""
        self._closed(True)

    def discard(self) -> None:
        """The worker was lost, and may write on for a while."""
        self._closed(False)


def lost(job: str, why: str = "") -> ArrayLost:
    """What is said of results that are lost for good."""
    reason = f": {why}" if why else ""
    return ArrayLost(
        f"a result of job {job} was lost with its device before it was written, and could not be computed again{reason}"
    )


def places_of(results: dict[str, Upload]) -> dict[str, tuple[ArraySpec, Extent | None]]:
    """Where the results of a task belong."""
    return {name: (upload.spec, upload.extent) for name, upload in results.items()}
