"""Recovery of pending results that an earlier process left: what they were made of is looked up and pinned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gemmserve_service.errors import NotFound
from gemmserve_service.jobs.compile_program import product_result
from gemmserve_service.jobs.prepare import understood
from gemmserve_service.programs import Program, outputs
from gemmserve_service.scheduling.results.recomputation import Lineage
from gemmserve_service.schemas import ArrayInfo
from gemmserve_service.store.record import ArraySpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gemmserve_service.jobs.job_queue import JobQueue
    from gemmserve_service.scheduling.scheduler import Scheduler
    from gemmserve_service.schemas import GemmJob, GemmReduceJob, JobInfo, ProgramJob
    from gemmserve_service.store.array_store import ArrayStore
    from gemmserve_service.store.pending import PendingResults


async def recover(store: ArrayStore, queue: JobQueue, scheduler: Scheduler) -> None:
    """Compute again what somebody needs. The unfinished jobs have pinned their operands before."""
    found = store.found_pending
    jobs = {info.id: (info, request) for info, request in await queue.succeeded(found)} if found else {}

    async def lineage_of(pending: PendingResults) -> Lineage:
        return await _lineage(pending, jobs, store, scheduler)

    await scheduler.writes.recover(found, lineage_of)
    found.clear()


async def _lineage(
    pending: PendingResults,
    jobs: Mapping[str, tuple[JobInfo, GemmJob | GemmReduceJob | ProgramJob]],
    store: ArrayStore,
    scheduler: Scheduler,
) -> Lineage:
    """Raises NotFound, ArrayLost, KernelError."""
    job, request = jobs.get(pending.job, (None, None))
    if job is None or request is None:
        raise NotFound(f"no job {pending.job}")
    records = {record.info.id: record for record in pending.records}
    stored = {}
    for name, array_id in (job.result or {}).items():
        record = records.get(array_id)
        if record is None or not isinstance(record.info, ArrayInfo):
            raise NotFound(f"no array {array_id}")
        info = record.info
        stored[name] = ArraySpec(info.id, info.dtype, info.shape, info.order, info.nbytes, None, False, info.owner)
    params, problem, operands = await understood(request, job.owner, store=store, scheduler=scheduler, recovered=True)
    named = str if job.op == "program" else product_result
    results = {name: stored[named(name)] for name in outputs(problem) if named(name) in stored}
    algorithm = None if isinstance(problem, Program) else job.algorithm
    return Lineage(params, problem, operands, results, algorithm, job.owner, request.verify)
