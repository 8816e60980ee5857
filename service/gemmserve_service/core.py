"""The service without HTTP: store, queue, scheduler and executor put together."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from gemmserve_service.database import Database
from gemmserve_service.jobs import Jobs
from gemmserve_service.observers import DeviceInfo, Observer, Snapshot
from gemmserve_service.queue import SqliteQueue
from gemmserve_service.scheduler import Scheduler
from gemmserve_service.store import ArrayStore

if TYPE_CHECKING:
    from gemmserve_service.executor.base import Executor
    from gemmserve_service.settings import Settings


class Core:
    """One per front process; everything in it runs in one event loop.

    `observers` are told each change of a job; `snapshot()` gives the gauges.
    """

    def __init__(self, settings: Settings, executor: Executor | None = None) -> None:
        if executor is None:
            from gemmserve_service.executor.inline import InlineExecutor

            executor = InlineExecutor()
        self.settings = settings
        self.executor = executor
        self.observers: list[Observer] = []
        self.database = Database(settings.data_dir / "gemmserve.sqlite", durability=settings.durability)
        self.store = ArrayStore(settings, self.database)
        self.scheduler = Scheduler(settings, self.store, executor)
        self.jobs = Jobs(settings, self.store, SqliteQueue(self.database, self.store), self.scheduler, self.observers)
        self.started_at = time.time()

    @property
    def draining(self) -> bool:
        """Whether new work is refused."""
        return self.scheduler.draining

    async def start(self) -> None:
        """Opens the database, recovers arrays and jobs, and starts the executor. What it raises leaves nothing open."""
        try:
            await self.database.start()
            await self.store.start()
            await self.jobs.start()
            await self.executor.start(self.scheduler)
        except BaseException:
            await self.stop()
            raise

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new work, answers waiting clients, and gives what runs `timeout_s` to end. True if all of it did.

        Queued jobs stay queued: they run at the next start.
        """
        self.scheduler.drain()
        self.jobs.release_waiters()
        return await self.scheduler.idle(timeout_s)

    async def stop(self) -> None:
        """Stops at once; durable jobs that run are queued again at the next start."""
        self.scheduler.stop()
        self.jobs.release_waiters()
        await self.executor.stop()
        await self.jobs.stop()
        await self.store.stop()
        await self.database.stop()

    def ready(self) -> tuple[bool, list[str]]:
        """Whether work is admitted and can run, and if not, why not."""
        reasons = []
        if self.draining:
            reasons.append("draining")
        if not any(worker.ready for worker in self.executor.workers()):
            reasons.append("no worker has answered a verified product")
        return not reasons, reasons

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
            )
            for worker in self.executor.workers()
        ]

    def usage(self) -> dict[str, Any]:
        """Bytes and counts against their limits (null: no limit of its own)."""
        return {
            "arrays": self.store.count,
            "store_bytes": self.store.used_bytes,
            "max_store_bytes": self.settings.max_store_bytes,
            "max_array_bytes": self.settings.max_array_bytes,
            "scratch_bytes": self.store.scratch_bytes,
            "jobs_queued": self.scheduler.queued,
            "max_queued_jobs": self.settings.max_queued_jobs,
            "jobs_running": self.scheduler.running,
        }

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
            devices=self.devices(),
        )
