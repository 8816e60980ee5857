"""Observers of the core: devices, gauges, and each change of a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from gemmserve_service.executor.protocol import Kept
    from gemmserve_service.jobs.one_shot import EndedJob
    from gemmserve_service.schemas import JobInfo


@dataclass(frozen=True)
class DeviceInfo:
    """One device and the worker that owns it."""

    id: str
    """"cpu", "cuda:0", "rocm:1"."""
    state: str
    """"ready", "starting" (or restarting)."""
    spec: dict[str, Any]
    """`gemmserve_kernels.DeviceSpec` as a mapping; empty until the worker said hello."""
    compute_modes: tuple[str, ...]
    memory_total: int
    memory_used: int
    jobs_running: int
    verified_error: float | None
    """Relative error of the product that the worker checked at its start."""
    restarts: int
    kept: Kept | None = None
    """State of the copies of arrays that its worker keeps, as it reported it last; None: it keeps none."""


@dataclass(frozen=True)
class Snapshot:
    """Gauges, read at scrape time."""

    queue_depth: int
    running: int
    store_bytes: int
    scratch_bytes: int
    array_count: int
    recycled_bytes: int
    worker_restarts: int
    queue_bytes: int
    """Bytes of operands and results of the jobs that wait."""
    queue_owners: int
    """Owners that have jobs waiting."""
    drain_rate: float
    """Jobs that end in a second while others wait."""
    workers_killed: int
    """Workers killed by the watchdog."""
    ends_unrecorded: int
    """Jobs that are over and whose end cannot be put on record yet."""
    devices: list[DeviceInfo]
    results_recomputed: int = 0
    """Jobs whose results were lost with their device before they were written, and computed again."""
    results_lost: int = 0
    """Jobs whose results were lost so, and could not be."""
    write_backs_spared: int = 0
    """Jobs whose results were deleted before they were written."""


class Observer(Protocol):
    """Called in the event loop; must not block."""

    def job_changed(self, job: JobInfo | EndedJob, nbytes: int, flops: int) -> None:
        """A job entered `job.state`; one-shot jobs are told once, when they end. `nbytes`, `flops`: of its problem."""
