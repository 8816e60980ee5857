"""The service without HTTP: store, queue, scheduler and executor put together."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from gemmserve_service.jobs.job_queue import SqliteQueue
from gemmserve_service.jobs.jobs import Jobs
from gemmserve_service.jobs.observers import DeviceInfo, Observer, Snapshot
from gemmserve_service.runtime import clock
from gemmserve_service.scheduling.prefetch import Prefetcher
from gemmserve_service.scheduling.scheduler import Scheduler
from gemmserve_service.store.array_store import ArrayStore
from gemmserve_service.store.database.database import Database
from gemmserve_service.store.quotas import Quotas
from gemmserve_service.store.resumable.uploads import ResumableUploads
from gemmserve_service.tenancy.keyring import KeyringError, KeyringWatch

if TYPE_CHECKING:
    from gemmserve_service.executor.port import Executor
    from gemmserve_service.jobs.one_shot import EndedJob
    from gemmserve_service.settings import Settings

log = logging.getLogger(__name__)


class Core:
    """Service of one front process; everything in it runs in one event loop.

    `observers` are told each change of a job; `snapshot()` gives the gauges.
    """

    def __init__(self, settings: Settings, executor: Executor) -> None:
        self.settings = settings
        self.executor = executor
        self.observers: list[Observer] = []
        self.database = Database(settings.data_dir / "gemmserve.sqlite", durability=settings.durability)
        self.keyring = KeyringWatch(settings.data_dir, settings.keys_file)
        self.quotas = Quotas(self.keyring.quota, self.database)
        self.store = ArrayStore(settings, self.database, self.quotas)
        self.uploads = ResumableUploads(settings, self.store, self.database, self.quotas)
        self.scheduler = Scheduler(settings, self.store, executor)
        self.scheduler.queue.weight_of = self.keyring.weight
        if settings.device_prefetch:
            self.store.on_uploaded(Prefetcher(executor).stored)
        self.jobs = Jobs(settings, self.store, SqliteQueue(self.database, self.store), self.scheduler, self.observers)
        self.started_at = clock.time()

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
        until = time.monotonic() + timeout_s
        idle = await self.scheduler.idle(timeout_s)
        if not await self.scheduler.writes.flush(max(until - time.monotonic(), 0.0)):
            log.warning("not every result on a device could be written: the next start computes them again")
        return idle

    async def stop(self) -> None:
        """Stops at once; durable jobs that run are queued again at the next start."""
        self.scheduler.stop()
        await self.scheduler.watchdog.stop()
        self.jobs.release_waiters()
        await self.executor.stop()
        await self.jobs.stop()
        await self.scheduler.writes.stop()
        await self.uploads.stop()
        await self.store.stop()
        self.quotas.stop()
        await self.database.stop()
        await self.keyring.stop()

    def ready(self) -> tuple[bool, list[str]]:
        """Whether work is admitted and can run, and if not, why not."""
        reasons = []
        if self.draining:
            reasons.append("draining")
        if not any(worker.ready for worker in self.executor.workers()):
            reasons.append("no worker has answered a verified product")
        if stalled := self.scheduler.stalled():
            reasons.append(f"{self.scheduler.queued} jobs wait, and " + ", ".join(stalled))
        if self.jobs.recorder.waiting:
            reasons.append("the database cannot be written: ends of jobs wait to be put on record")
        return not reasons, reasons

    def observe(self, job: EndedJob, size: tuple[int, int]) -> None:
        """Tells the observers of a job of a single request that has ended; `size`: its bytes and operations."""
        for observer in self.observers:
            observer.job_changed(job, *size)

    def devices(self) -> list[DeviceInfo]:
        """The devices and their workers' state."""
        return [
            DeviceInfo(
                id=worker.id,
                state="ready" if worker.ready else "starting",
                spec=worker.spec_fields,
                compute_modes=tuple(worker.spec_fields.get("compute_modes", ())),
                memory_total=int(worker.spec_fields.get("memory_bytes", 0)),
                memory_used=worker.memory_used,
                jobs_running=len(worker.tasks),
                verified_error=worker.verified_error,
                restarts=worker.restarts,
                kept=worker.kept,
            )
            for worker in self.executor.workers()
        ]

    def usage(self, owner: str) -> dict[str, Any]:
        """Return an owner's usage ("": everybody's) beside its quotas and the server's limits (null: no limit)."""
        everybody = not owner
        scheduler, quotas = self.scheduler, self.quotas
        running = [task for worker in self.executor.workers() for task in worker.tasks.values()]
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

    def snapshot(self) -> Snapshot:
        """Gauges for the metrics."""
        return Snapshot(
            queue_depth=self.scheduler.queued,
            running=self.scheduler.running,
            store_bytes=self.store.used_bytes,
            scratch_bytes=self.store.scratch_bytes,
            array_count=self.store.count,
            recycled_bytes=self.store.recycled_bytes,
            worker_restarts=sum(worker.restarts for worker in self.executor.workers()),
            queue_bytes=self.scheduler.queue.nbytes,
            queue_owners=self.scheduler.queue.owners,
            drain_rate=self.scheduler.admissions.drain_rate,
            workers_killed=self.scheduler.watchdog.killed,
            ends_unrecorded=len(self.jobs.recorder.waiting),
            devices=self.devices(),
            results_recomputed=self.scheduler.writes.recomputed,
            results_lost=self.scheduler.writes.lost,
            write_backs_spared=self.scheduler.writes.spared,
        )
