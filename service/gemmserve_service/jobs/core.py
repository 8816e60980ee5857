"""The service without HTTP: store, queue, scheduler and executor put together."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gemmserve_service.jobs.job_queue import SqliteQueue
from gemmserve_service.jobs.jobs import Jobs
from gemmserve_service.runtime import clock
from gemmserve_service.scheduling.scheduler import Scheduler
from gemmserve_service.schemas import Device, DeviceHealth, DeviceLink
from gemmserve_service.store.array_store import ArrayStore
from gemmserve_service.store.database.database import Database
from gemmserve_service.store.quotas import Quotas
from gemmserve_service.store.resumable.uploads import ResumableUploads
from gemmserve_service.tenancy.cells import read_cells
from gemmserve_service.tenancy.keyring import KeyringError, KeyringWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_service.executor.port import Executor
    from gemmserve_service.jobs.observers import Observer
    from gemmserve_service.jobs.one_shot import EndedJob
    from gemmserve_service.runtime.tracing.spans import Tracing
    from gemmserve_service.settings import Settings
    from gemmserve_service.store.extents.arena import Arena
    from gemmserve_service.tenancy.api_keys import Quota

_WAIT_FOR_THE_NEXT: Final = "Wait until it is started again: jobs that were accepted go on then."
_LOOK_AT_THE_WORKERS: Final = (
    "Wait a minute if the server has just started: the first start compiles kernels. Else its log says why the worker "
    "does not start, and `gemmserve doctor` what the machine lacks."
)
_WAIT_FOR_THE_WATCHDOG: Final = (
    "Wait: a worker that hangs is started again, and its jobs run once more. If it comes back, look at the server's "
    "log and at the device's warnings."
)
_MAKE_ROOM: Final = (
    "Make room on the disk of the data directory, or let the server write there: nothing is lost, and what waits is "
    "recorded then."
)

log = logging.getLogger(__name__)


class Unready(NamedTuple):
    """Reason for which the server is not ready, and what to do about it."""

    reason: str
    remedy: str


class Core:
    """Service of one front process; everything in it runs in one event loop.

    `observers` are told each change of a job.
    """

    def __init__(
        self,
        settings: Settings,
        executor: Executor,
        arena: Arena | None = None,
        tracing: Tracing | None = None,
        keyring: KeyringWatch | None = None,
    ) -> None:
        """`arena`: host memory that results come to from accelerators, where there is any. `tracing`: None: no
        request is traced. `keyring`: where the executor looks at the keys too.
        """
        self.settings = settings
        self.executor = executor
        self.tracing = tracing
        self.observers: list[Observer] = []
        self.database = Database(settings.data_dir / "gemmserve.sqlite", durability=settings.durability)
        self.keyring = keyring or KeyringWatch(settings.data_dir, settings.keys_file)
        self.cells = read_cells(settings)
        self.quotas = Quotas(partial(_share, self.keyring.quota, self.cells.count), self.database)
        self.store = ArrayStore(settings, self.database, self.quotas, arena)
        self.database.on_full = self.store.trim
        self.uploads = ResumableUploads(settings, self.store, self.database, self.quotas)
        self.scheduler = Scheduler(settings, self.store, executor)
        self.scheduler.queue.weight_of = self.keyring.weight
        self.jobs = Jobs(
            settings, self.store, SqliteQueue(self.database, self.store), self.scheduler, self.observers, tracing
        )
        if self.cells.urls:  # loaded where they are needed
            from gemmserve_service.jobs.cells.operands import Operands
            from gemmserve_service.jobs.cells.peers import Peers

            self.jobs.operands = Operands(self.cells, self.store, Peers(self.cells))
        self.started_at = clock.time()
        self.on_drain: list[Callable[[], None]] = []
        """Callbacks for the beginning of a drain, in the event loop."""
        self._drained_at = 0.0
        """Time at which a drain ends at the latest (time.monotonic)."""

    @property
    def draining(self) -> bool:
        """Whether new work is refused."""
        return self.scheduler.draining

    async def start(self) -> None:
        """Opens the database, recovers arrays and jobs, and starts the executor. What it raises leaves nothing open."""
        try:
            await self.keyring.start()
            await self.database.start()
            await self.quotas.start()
            await self.store.start(keep=await self.uploads.load())
            if self.store.tier is not None:
                self.store.tier.on_arrival(self.scheduler.dispatch_soon)
            await self.uploads.start()
            self._check_keys()
            await self.jobs.start()
            await self.executor.start(self.scheduler)
            self.scheduler.watchdog.start()
        except BaseException:
            await self.stop()
            raise

    def _check_keys(self) -> None:
        """Refuse to show arrays of lost API keys to everybody, unless the server listens on the loopback alone."""
        if self.keyring.current.closed or not self.store.owners() - {""}:
            return
        text = f"{self.settings.data_dir} holds arrays of API keys, and its keys.json is gone"
        if not self.settings.loopback:
            raise KeyringError(f"{text}: restore it, or listen on 127.0.0.1")
        log.warning("%s: whoever reaches this server sees them", text)

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new work, answers waiting clients, and gives what runs `timeout_s` to end. True if all of it did.

        Queued jobs stay queued: they run at the next start.
        """
        self.scheduler.drain()
        self.jobs.release_waiters()
        self._drained_at = time.monotonic() + timeout_s
        for tell in self.on_drain:
            tell()
        idle = await self.scheduler.idle(timeout_s)
        if not await self.scheduler.writes.flush(max(self._drained_at - time.monotonic(), 0.0)):
            log.warning("not every result on a device could be written: the next start computes them again")
        return idle

    async def stop(self) -> None:
        """Stops at once; durable jobs that run are queued again at the next start."""
        self.scheduler.stop()
        await self.scheduler.watchdog.stop()
        self.jobs.release_waiters()
        await self.executor.stop()
        self.scheduler.deliveries.stop()
        await self.jobs.stop()
        await self.scheduler.writes.stop()
        await self.uploads.stop()
        await self.store.stop()
        self.quotas.stop()
        await self.database.stop()
        await self.keyring.stop()

    def ready(self) -> tuple[bool, list[str]]:
        """Whether work is admitted and can run, and if not, why not."""
        reasons = [each.reason for each in self.unready()]
        return not reasons, reasons

    def unready(self) -> list[Unready]:
        """Reasons for which work is not admitted or cannot run; none if it is ready."""
        reasons = []
        if self.draining:
            reasons.append(Unready(self._draining(), _WAIT_FOR_THE_NEXT))
        if not any(worker.ready for worker in self.executor.workers()):
            reasons.append(Unready("no worker has answered a verified product", _LOOK_AT_THE_WORKERS))
        if stalled := self.scheduler.stalled():
            reason = f"{self.scheduler.queued} jobs wait, and " + ", ".join(stalled)
            reasons.append(Unready(reason, _WAIT_FOR_THE_WATCHDOG))
        if self.jobs.recorder.waiting:
            reason = "the database cannot be written: ends of jobs wait to be put on record"
            reasons.append(Unready(reason, _MAKE_ROOM))
        return reasons

    def _draining(self) -> str:
        jobs, nbytes = self.scheduler.writes.unwritten
        if not jobs:
            return "draining"
        left_s = max(self._drained_at - time.monotonic(), 0.0)
        return (
            f"draining: {nbytes} bytes of results of {jobs} jobs are not on disk yet, which takes about "
            f"{self.scheduler.writes.write_s:.0f} s; what is not in {left_s:.0f} s is computed again by the next start"
        )

    def observe(self, job: EndedJob, size: tuple[int, int]) -> None:
        """Tells the observers of a job of a single request that has ended; `size`: its bytes and operations."""
        for observer in self.observers:
            observer.job_ended(job, *size)

    def devices(self) -> list[Device]:
        """The devices and their workers' state."""
        return [
            Device(
                id=worker.id,
                state=worker.state,
                spec=worker.spec_fields,
                compute_modes=tuple(worker.spec_fields.get("compute_modes", ())),
                memory_total=int(worker.spec_fields.get("memory_bytes", 0)),
                memory_used=worker.memory_used,
                jobs_running=len(worker.tasks),
                verified_error=worker.verified_error,
                restarts=worker.restarts,
                health=worker.health if worker.ready else DeviceHealth(),
                link=None if worker.link is None else DeviceLink(**asdict(worker.link)),
            )
            for worker in self.executor.workers()
        ]

    def usage(self, owner: str) -> dict[str, Any]:
        """Return an owner's usage ("": everybody's) beside its quotas and the server's limits (null: no limit)."""
        everybody = not owner
        scheduler, quotas = self.scheduler, self.quotas
        running = {task.whole for worker in self.executor.workers() for task in worker.tasks.values()}
        queued = scheduler.queued if everybody else scheduler.queue.waiting(owner)
        limits = quotas.limits(owner)
        stored = self.store.used_bytes if everybody else quotas.stored_bytes(owner)
        used = {
            "stored_bytes": stored,
            "inflight_bytes": quotas.inflight_bytes(owner),
            "queued_jobs": queued,
            "device_seconds_per_day": round(quotas.device_seconds(owner), 6),
        }
        return {
            "owner": owner or None,
            "arrays": self.store.count if everybody else self.store.count_of(owner),
            "store_bytes": stored,
            "max_store_bytes": self.settings.max_store_bytes,
            "max_array_bytes": self.settings.max_array_bytes,
            "scratch_bytes": self.store.scratch_bytes if everybody else quotas.scratch_bytes(owner),
            "jobs_queued": queued,
            "max_queued_jobs": self.settings.max_queued_jobs,
            "jobs_running": sum(everybody or task.owner == owner for task in running),
            "quotas": {name: {"used": used[name], "limit": getattr(limits, name)} for name in used},
            "resets_at": datetime.fromtimestamp(quotas.resets_at(), UTC).isoformat(),
        }

    def usage_by_owner(self) -> list[dict[str, Any]]:
        """`usage` of every owner that has a key or uses anything."""
        owners = {*self.keyring.current.owners, *self.quotas.owners()} - {""}
        return [self.usage(owner) for owner in sorted(owners)]


def _share(quota_of: Callable[[str], Quota], cells: int, owner: str) -> Quota:
    """An owner's limits in one of so many cells: an equal part of each, of bytes and jobs rounded up."""
    quota = quota_of(owner)
    return quota if cells == 1 else quota.part(cells)
