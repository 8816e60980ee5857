"""Prometheus metrics of one app, prefix ``gemmserve_``: counters fed by events, gauges read from the core at scrape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gemmserve_service.http.metrics.counters import Distribution, Tally
from gemmserve_service.schemas import Elements

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from gemmserve_service.http.transfer.pool import TransferPool
    from gemmserve_service.jobs.core import Core
    from gemmserve_service.jobs.observers import DeviceInfo
    from gemmserve_service.jobs.one_shot import EndedJob
    from gemmserve_service.schemas import JobInfo

# Seconds from a kernel of 100 us to a queue of minutes, a factor of about 3 apart.
_SECONDS: Final = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3, 10, 30, 100, 300)

_RESIDUALS: Final = (1e-17, 1e-16, 1e-15, 1e-14, 1e-12, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1)


class Metrics:
    """The app's own registry; an observer of the core's jobs and of the middleware's requests."""

    def __init__(self, core: Core) -> None:
        self.registry = registry = CollectorRegistry()
        self._jobs = Tally(
            "gemmserve_jobs", "Jobs by the state they entered.", ["op", "algorithm", "state"], registry=registry
        )
        self._phases = Distribution(
            "gemmserve_job_phase_seconds",
            "Seconds of finished jobs by phase.",
            _SECONDS,
            ["op", "phase"],
            registry=registry,
        )
        self._residuals = Distribution(
            "gemmserve_job_residual",
            "Relative errors that checks found, by algorithm.",
            _RESIDUALS,
            ["algorithm"],
            registry=registry,
        )
        self._mismatches = Tally(
            "gemmserve_job_mismatches",
            "Results that a check found wrong; they were computed again in plain arithmetic.",
            ["algorithm"],
            registry=registry,
        )
        self._elements = Tally(
            "gemmserve_result_elements",
            "Elements of results by the way in which they were computed, of products that have more than one.",
            ["route"],
            registry=registry,
        )
        for route in Elements.model_fields:
            self._elements.add(route, by=0)
        self._flops = Tally(
            "gemmserve_flops",
            "Floating-point operations of succeeded jobs (complex: 8 m n k).",
            ["op"],
            registry=registry,
        )
        self._job_bytes = Tally(
            "gemmserve_job_bytes", "Bytes of operands and results of succeeded jobs.", ["op"], registry=registry
        )
        self._requests = Tally(
            "gemmserve_http_requests", "Requests answered.", ["route", "method", "status"], registry=registry
        )
        self._durations = Distribution(
            "gemmserve_http_request_duration_seconds",
            "From the first byte of the request to the last of the answer.",
            _SECONDS,
            ["route", "method"],
            registry=registry,
        )
        self._received = Tally("gemmserve_http_received_bytes", "Bytes of request bodies.", registry=registry)
        self._sent = Tally("gemmserve_http_sent_bytes", "Bytes of answer bodies.", registry=registry)
        self._refused_connections = Tally(
            "gemmserve_http_refused_connections",
            "Connections that were refused or cut off before a request of theirs reached a route.",
            ["problem"],
            registry=registry,
        )
        self._batches = Distribution(
            "gemmserve_batch_size",
            "Products that a worker was sent together.",
            (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096, 16_384),
            registry=registry,
        )
        core.scheduler.group_sent = self.batch_sent
        self.registry.register(_Gauges(core))

    def job_changed(self, job: JobInfo | EndedJob, nbytes: int, flops: int) -> None:
        """`Observer`: counts the state; adds times, bytes and operations once the job has succeeded."""
        self._jobs.add(job.op, job.algorithm or "none", job.state.value)
        if job.timings is not None and job.state.final:
            self._phases.observe(job.timings.queue_s, job.op, "queue")
            self._phases.observe(job.timings.h2d_s, job.op, "h2d")
            self._phases.observe(job.timings.kernel_s, job.op, "kernel")
            self._phases.observe(job.timings.d2h_s, job.op, "d2h")
        if job.residual is not None:
            self._residuals.observe(job.residual, job.algorithm or "none")
        if job.mismatch is not None:
            self._mismatches.add(job.algorithm or "none")
        if job.elements is not None:
            for route, count in job.elements:
                self._elements.add(route, by=count)
        if job.state == "succeeded":
            self._flops.add(job.op, by=flops)
            self._job_bytes.add(job.op, by=nbytes)

    def batch_sent(self, size: int) -> None:
        """Counts what a worker was sent at one time: so many products."""
        self._batches.observe(size)

    def request_done(self, route: str, method: str, status: int, *, seconds: float, received: int, sent: int) -> None:
        """Counts one request; `route` is a template such as /v1/arrays/{array_id}, never a path."""
        self._requests.add(route, method, status)
        self._durations.observe(seconds, route, method)
        self._received.add(by=received)
        self._sent.add(by=sent)

    def connection_refused(self, problem: str) -> None:
        """Counts one; `problem` is the slug of the reason."""
        self._refused_connections.add(problem)

    def watch(self, transfers: TransferPool) -> None:
        """Shows what the transfer processes do."""
        self.registry.register(_Transfers(transfers))

    def render(self, accept: str | None) -> tuple[bytes, str]:
        """The exposition and its content type: OpenMetrics where `accept` asks for it, else Prometheus text."""
        encode, content_type = choose_encoder(accept or "")
        return encode(self.registry), content_type


class _Gauges(Collector):
    """State of the core at the moment of a scrape."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def describe(self) -> list[Metric]:
        """Return nothing at registration: the core may not have started."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One snapshot."""
        now = self._core.snapshot()
        for name, text, value in (
            ("queue_depth", "Jobs that wait.", now.queue_depth),
            ("queue_bytes", "Bytes of operands and results of the jobs that wait.", now.queue_bytes),
            ("queue_owners", "Owners that have jobs waiting.", now.queue_owners),
            ("queue_drain_per_second", "Jobs that end in a second while others wait.", now.drain_rate),
            ("job_ends_unrecorded", "Jobs over whose end cannot be put on record yet.", now.ends_unrecorded),
            ("jobs_running", "Jobs that run.", now.running),
            ("array_store_bytes", "Bytes of stored arrays.", now.store_bytes),
            ("array_store_arrays", "Arrays stored.", now.array_count),
            ("array_store_recycled_bytes", "Bytes of freed extents kept for reuse.", now.recycled_bytes),
            ("scratch_bytes", "Bytes of operands and results of one-shot requests.", now.scratch_bytes),
            ("ready", "Whether work is admitted and can run.", int(self._core.ready()[0])),
        ):
            yield GaugeMetricFamily(f"gemmserve_{name}", text, value=value)
        yield CounterMetricFamily("gemmserve_worker_restarts", "Workers started again.", value=now.worker_restarts)
        yield CounterMetricFamily("gemmserve_workers_killed", "Workers killed because they hung.", now.workers_killed)
        for name, text, value in (
            (
                "results_recomputed",
                "Jobs whose results were lost with a device and computed again.",
                now.results_recomputed,
            ),
            ("results_lost", "Jobs whose results were lost with a device for good.", now.results_lost),
            ("write_backs_spared", "Jobs whose results were deleted before they were written.", now.write_backs_spared),
        ):
            yield CounterMetricFamily(f"gemmserve_{name}", text, value=value)
        yield from _caches(now.devices)
        used = GaugeMetricFamily("gemmserve_device_memory_used_bytes", "Device memory in use.", labels=["device"])
        total = GaugeMetricFamily("gemmserve_device_memory_total_bytes", "Device memory.", labels=["device"])
        running = GaugeMetricFamily("gemmserve_device_jobs_running", "Jobs that run on the device.", labels=["device"])
        for device in now.devices:
            used.add_metric([device.id], device.memory_used)
            total.add_metric([device.id], device.memory_total)
            running.add_metric([device.id], device.jobs_running)
        yield from (used, total, running)


class _Transfers(Collector):
    """Counts and state of transfer processes."""

    def __init__(self, transfers: TransferPool) -> None:
        self._transfers = transfers

    def collect(self) -> Iterator[Metric]:
        """One snapshot."""
        transfers = self._transfers
        moved = CounterMetricFamily(
            "gemmserve_transfer_bytes", "Bytes of bodies that transfer processes moved.", labels=["direction"]
        )
        for direction in ("in", "out"):
            moved.add_metric([direction], transfers.transferred_bytes[direction])
        yield moved
        for name, text, value in (
            ("transfers_running", "Bodies that transfer processes are at.", transfers.under_way),
            ("transfer_processes", "Transfer processes that are there.", transfers.ready),
        ):
            yield GaugeMetricFamily(f"gemmserve_{name}", text, value=value)
        for name, text, value in (
            ("transfer_process_restarts", "Transfer processes started again.", transfers.restarts),
            ("transfer_processes_killed", "Transfer processes killed because they hung.", transfers.killed),
        ):
            yield CounterMetricFamily(f"gemmserve_{name}", text, value=value)


def _caches(devices: list[DeviceInfo]) -> Iterator[Metric]:
    """Yield the bytes of arrays that devices keep, and how often an array was there when it was asked for."""
    kept = [(device.id, device.kept) for device in devices if device.kept is not None]
    for name, text, field in (
        ("cache_bytes", "Bytes of copies of arrays and of what was prepared of them.", "used"),
        ("cache_budget_bytes", "Bytes that they may take.", "budget"),
        ("unwritten_bytes", "Bytes of results that are not in the store yet.", "unwritten"),
    ):
        gauge = GaugeMetricFamily(f"gemmserve_device_{name}", text, labels=["device"])
        for device, each in kept:
            gauge.add_metric([device], getattr(each, field))
        yield gauge
    for name, text, field in (
        ("cache_hits", "Operands, and forms prepared of them, that were on the device.", "hits"),
        ("cache_misses", "Operands, and forms of them, that were not.", "misses"),
        ("cache_evictions", "Copies and prepared forms that had to go for others.", "evictions"),
    ):
        counter = CounterMetricFamily(f"gemmserve_device_{name}", text, labels=["device"])
        for device, each in kept:
            counter.add_metric([device], getattr(each, field))
        yield counter
