"""Snapshot of the core as one caller may see it: who may not see others' things sees them summed, without names."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from gemmserve_service.http.overview.schemas import (
    Failure,
    FailureProblem,
    Memory,
    Overview,
    OverviewDevice,
    OwnerQueue,
    Reason,
    Residency,
    Running,
    Space,
)
from gemmserve_service.jobs.core import state_of
from gemmserve_service.programs import Program
from gemmserve_service.remedies import remedy
from gemmserve_service.runtime import clock
from gemmserve_service.schemas import DeviceLink
from gemmserve_service.tenancy.api_keys import Scope

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gemmserve_service.executor.port import Worker
    from gemmserve_service.http.overview.recent import FailedJob, Recent
    from gemmserve_service.jobs.core import Core
    from gemmserve_service.scheduling.tasks import Task
    from gemmserve_service.tenancy.identity import Caller

_VERSION: Final = version("gemmserve")
_RUNNING: Final = 16  # tasks of a device; a worker may have more in line
_OWNERS: Final = 50  # lines of the queue
_DETAIL: Final = 1000  # characters


@dataclass(frozen=True, slots=True)
class View:
    """Rights of a caller: equal ones are shown the same."""

    owner: str
    everybody: bool

    @classmethod
    def of(cls, caller: Caller) -> View:
        """Return the rights of a caller: admins, and everyone while there are no keys, see everybody's things."""
        everybody = caller.may(Scope.ADMIN)
        return cls("" if everybody else caller.owner, everybody)

    def sees(self, owner: str) -> bool:
        """Whether that owner's things are shown."""
        return self.everybody or owner == self.owner


@dataclass(slots=True)
class _Share:
    """Tasks of one owner."""

    queued: int = 0
    running: int = 0
    oldest: float | None = None
    """Time of submission of the oldest that waits (time.monotonic)."""

    def add(self, other: _Share) -> None:
        """Count the other's tasks here too."""
        self.queued += other.queued
        self.running += other.running
        known = [oldest for oldest in (self.oldest, other.oldest) if oldest is not None]
        self.oldest = min(known, default=None)


class Snapshot:
    """State of the core at one moment, from which the overviews of several callers are made."""

    def __init__(self, core: Core, recent: Recent) -> None:
        self._core = core
        self._recent = recent
        self._now = clock.time()
        self._since_boot = time.monotonic()
        self._reasons = core.unready()
        self._shares = _shares(core)

    def overview(self, view: View) -> Overview:
        """Return what that caller may see, without the history."""
        core = self._core
        ready = not self._reasons
        return Overview(
            time=self._now,
            version=_VERSION,
            started=core.started_at,
            state="ready" if ready else "draining" if core.draining else "not ready",
            ready=ready,
            reasons=[Reason(reason=each.reason, remedy=each.remedy) for each in self._reasons],
            devices=[self._device(number, worker, view) for number, worker in enumerate(core.executor.workers())],
            queue=self._queue(view),
            memory=_memory(core),
            failures=[
                self._failure(failed) for failed in self._recent.failures(None if view.everybody else view.owner)
            ],
        )

    def _device(self, index: int, worker: Worker, view: View) -> OverviewDevice:
        spec, health = worker.spec, worker.health
        sensors = health.model_dump(exclude={"warnings"}) if worker.ready else {}
        tasks = sorted(worker.tasks.values(), key=lambda task: task.began)[:_RUNNING]
        return OverviewDevice(
            index=index,
            id=worker.id,
            name=worker.id if spec is None else spec.name,
            backend=worker.id.rpartition("/")[2].partition(":")[0],
            state=state_of(worker),
            memory_bytes=None if spec is None else spec.memory_bytes,
            memory_used_bytes=worker.memory_used,
            resident_bytes=None if worker.kept is None else worker.kept.used,
            health=list(health.warnings) if worker.ready else [],
            running=[self._running(task, view) for task in tasks],
            link=None if worker.link is None else DeviceLink(**asdict(worker.link)),
            **sensors,
        )

    def _running(self, task: Task, view: View) -> Running:
        since = self._moment(task.began)
        if not view.sees(task.owner):
            return Running(since=since)
        return Running(
            id=task.id if task.durable else None,
            kind=task.params.op,
            what=_what(task),
            since=since,
            owner=self._name(task.owner),
        )

    def _queue(self, view: View) -> list[OwnerQueue]:
        seen = [(owner, share) for owner, share in self._shares.items() if view.sees(owner)]
        seen.sort(key=lambda each: (-each[1].queued, -each[1].running, each[0]))
        others = _Share()
        for share in (share for owner, share in self._shares.items() if not view.sees(owner)):
            others.add(share)
        for _, share in seen[_OWNERS:]:
            others.add(share)
        lines = [self._line(self._name(owner), share) for owner, share in seen[:_OWNERS]]
        if others.queued or others.running:
            lines.append(self._line(None, others))
        return lines

    def _line(self, owner: str | None, share: _Share) -> OwnerQueue:
        oldest = None if share.oldest is None else self._moment(share.oldest)
        return OwnerQueue(owner=owner, queued=share.queued, running=share.running, oldest=oldest)

    def _failure(self, failed: FailedJob) -> Failure:
        problem = failed.problem
        detail = problem.detail
        return Failure(
            time=failed.time,
            job=failed.job,
            owner=self._name(failed.owner),
            kind=failed.kind,
            problem=FailureProblem(
                type=problem.type,
                title=problem.title,
                status=problem.status,
                detail=None if detail is None else detail[:_DETAIL],
            ),
            remedy=remedy(problem.type.rpartition("/")[2]),
        )

    def _name(self, owner: str) -> str | None:
        """Name of an owner, as the operator gave it; the id of one without a record, None without keys."""
        record = self._core.keyring.current.owners.get(owner)
        return (owner or None) if record is None else record.name

    def _moment(self, monotonic: float) -> float:
        """Return the time of day of a moment by time.monotonic, to the hundredth of a second below, never to come."""
        return math.floor((self._now - (self._since_boot - monotonic)) * 100) / 100


def _shares(core: Core) -> dict[str, _Share]:
    """Tasks by owner."""
    found: dict[str, _Share] = {}
    queue = core.scheduler.queue
    for owner in queue.waiting_owners():
        found[owner] = _Share(queued=queue.waiting(owner), oldest=queue.oldest(owner))
    for worker in core.executor.workers():
        for task in worker.tasks.values():
            found.setdefault(task.owner, _Share()).running += 1
    return found


def _memory(core: Core) -> Memory:
    store, arena = core.store, core.store.arena
    kept = [worker.kept for worker in core.executor.workers() if worker.kept is not None]

    def total(numbers: Iterable[int]) -> int:
        return sum(numbers)

    return Memory(
        resident=Residency(
            bytes=total(each.used for each in kept),
            limit=total(each.budget for each in kept),
            hits=total(each.hits for each in kept),
            misses=total(each.misses for each in kept),
        ),
        arena=None if arena is None else Space(bytes=arena.used_bytes, limit=arena.nbytes),
        store=Space(bytes=store.used_bytes, limit=core.settings.max_store_bytes),
        tier=None if store.tier is None else Space(bytes=store.tier.used_bytes, limit=core.settings.max_tier_bytes),
    )


def _what(task: Task) -> str:
    """Return a task's size in words: rows, columns and inner extent of its product, or how many products or steps."""
    problem = task.problem
    if isinstance(problem, Program):
        return f"{len(problem)} {'step' if len(problem) == 1 else 'steps'}"
    if not hasattr(problem, "batch_shape"):  # several products of one request
        return f"{task.products} products {problem.dtype.name}"
    several = f"{problem.batch} of " if problem.batch_shape else ""
    return f"{several}{problem.m} x {problem.n} x {problem.k} {problem.dtype.name}"
