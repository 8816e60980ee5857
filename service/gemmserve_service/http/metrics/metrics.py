"""Prometheus metrics of one app, prefix ``gemmserve_``: counters fed by events, gauges read from the core at scrape."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gemmserve_service.http.metrics.counters import Distribution, Tally
from gemmserve_service.schemas import Elements

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.metrics_core import Metric

    from gemmserve_service.executor.joined.executor import JoinedExecutor
    from gemmserve_service.http.transfer.pool import TransferPool
    from gemmserve_service.jobs.core import Core
    from gemmserve_service.jobs.forms.form import Ended
    from gemmserve_service.jobs.one_shot import EndedJob
    from gemmserve_service.schemas import JobInfo, JobState
    from gemmserve_service.store.tier.tier import Tier

# Seconds from a kernel of 100 us to a queue of minutes, a factor of about 3 apart.
_SECONDS: Final = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3, 10, 30, 100, 300)

_PHASES: Final = ("queue", "compile", "h2d", "kernel", "d2h")

_RESIDUALS: Final = (1e-17, 1e-16, 1e-15, 1e-14, 1e-12, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1)


class Metrics:
    """The app's own registry; an observer of the core's jobs and of the middleware's requests."""

    def __init__(self, core: Core) -> None:
        self.registry = registry = CollectorRegistry()
        tally, distribution = partial(Tally, registry=registry), partial(Distribution, registry=registry)
        self._jobs = tally("gemmserve_jobs", "Jobs by the state they entered.", ["op", "algorithm", "state"])
        self._phases = distribution(
            "gemmserve_job_phase_seconds", "Seconds of finished jobs by phase.", _SECONDS, ["op", "phase"]
        )
        self._residuals = distribution(
            "gemmserve_job_residual", "Relative errors that checks found, by algorithm.", _RESIDUALS, ["algorithm"]
        )
        self._mismatches = tally(
            "gemmserve_job_mismatches",
            "Results that a check found wrong; they were computed again in plain arithmetic.",
            ["algorithm"],
        )
        self._elements = tally(
            "gemmserve_result_elements",
            "Elements of results by the way in which they were computed, of products that have more than one.",
            ["route"],
        )
        for route in Elements.model_fields:
            self._elements.add(route, by=0)
        self._flops = tally(
            "gemmserve_flops", "Floating-point operations of succeeded jobs (complex: 8 m n k).", ["op"]
        )
        self._job_bytes = tally("gemmserve_job_bytes", "Bytes of operands and results of succeeded jobs.", ["op"])
        self._requests = tally("gemmserve_http_requests", "Requests answered.", ["route", "method", "status"])
        self._durations = distribution(
            "gemmserve_http_request_duration_seconds",
            "From the first byte of the request to the last of the answer.",
            _SECONDS,
            ["route", "method"],
        )
        self._received = tally("gemmserve_http_received_bytes", "Bytes of request bodies.")
        self._sent = tally("gemmserve_http_sent_bytes", "Bytes of answer bodies.")
        self._refused_connections = tally(
            "gemmserve_http_refused_connections",
            "Connections that were refused or cut off before a request of theirs reached a route.",
            ["problem"],
        )
        self._batches = distribution(
            "gemmserve_batch_size",
            "Products that a worker was sent together.",
            (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096, 16_384),
        )
        core.scheduler.group_sent = self.batch_sent
        self.registry.register(_Gauges(core))

    def job_entered(self, job_id: str, op: str, state: JobState) -> None:  # noqa: ARG002
        """`Observer`: counts the state."""
        self._jobs.add(op, "none", state)

    def job_ended(self, job: JobInfo | Ended | EndedJob, nbytes: int, flops: int) -> None:
        """`Observer`: counts the state; adds times, and bytes and operations if the job has succeeded."""
        self._jobs.add(job.op, job.algorithm or "none", job.state)
        if job.timings is not None:
            spent = job.timings
            seconds = spent.queue_s, spent.compile_s, spent.h2d_s, spent.kernel_s, spent.d2h_s
            self._phases.observe_each(seconds, _series(job.op), job.trace)
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

    def request_done(
        self, route: str, method: str, status: int, *, seconds: float, received: int, sent: int, trace: str = ""
    ) -> None:
        """Counts one request; `route` is a template such as /v1/arrays/{array_id}, never a path. `trace`: traceparent
        of its span, where it is traced.
        """
        self._requests.add(route, method, status)
        self._durations.observe(seconds, route, method, trace=trace)
        self._received.add(by=received)
        self._sent.add(by=sent)

    def connection_refused(self, problem: str) -> None:
        """Counts one; `problem` is the slug of the reason."""
        self._refused_connections.add(problem)

    def totals(self) -> dict[str, float]:
        """Counts so far, as the overview's history has rates of them: products sent to workers, operations, bytes."""
        return {
            "products": self._batches.total,
            "flops": self._flops.total,
            "bytes_in": self._received.total,
            "bytes_out": self._sent.total,
        }

    def watch(self, transfers: TransferPool) -> None:
        """Shows what the transfer processes do."""
        self.registry.register(_Transfers(transfers))

    def watch_joined(self, joined: JoinedExecutor) -> None:
        """Shows what goes on by the join port."""
        self.registry.register(_Joined(joined))

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
        """State now."""
        core = self._core
        scheduler, store, writes = core.scheduler, core.store, core.scheduler.writes
        workers, devices, arena = core.executor.workers(), core.devices(), store.arena
        for name, text, value in (
            ("queue_depth", "Jobs that wait.", scheduler.queued),
            (
                "queue_bytes",
                "Bytes of results of the jobs that wait, and of operands and results of the one-shots.",
                scheduler.queue.nbytes,
            ),
            ("queue_owners", "Owners that have jobs waiting.", scheduler.queue.owners),
            (
                "queue_drain_per_second",
                "Jobs that end in a second while others wait.",
                scheduler.admissions.drain_rate,
            ),
            (
                "job_ends_unrecorded",
                "Jobs over whose end cannot be put on record yet.",
                len(core.jobs.recorder.waiting),
            ),
            ("jobs_running", "Jobs that run.", scheduler.products_running),
            ("array_store_bytes", "Bytes of stored arrays.", store.used_bytes),
            ("array_store_arrays", "Arrays stored.", store.count),
            ("array_store_recycled_bytes", "Bytes of freed extents kept for reuse.", store.recycled_bytes),
            ("scratch_bytes", "Bytes of operands and results of one-shot requests.", store.scratch_bytes),
            (
                "host_arena_bytes",
                "Memory for results on their way to files.",
                0 if arena is None else arena.nbytes,
            ),
            ("host_arena_used_bytes", "Bytes of it that results have.", 0 if arena is None else arena.used_bytes),
            ("ready", "Whether work is admitted and can run.", int(core.ready()[0])),
        ):
            yield GaugeMetricFamily(f"gemmserve_{name}", text, value=value)
        for name, text, value in (
            (
                "worker_restarts",
                "Workers started again.",
                sum(worker.restarts for worker in workers if worker.link is None),
            ),
            ("workers_killed", "Workers killed because they hung.", scheduler.watchdog.killed),
            (
                "results_recomputed",
                "Jobs whose results were lost with a device and computed again.",
                writes.recomputed,
            ),
            ("results_lost", "Jobs whose results were lost with a device for good.", writes.lost),
            ("write_backs_spared", "Jobs whose results were deleted before they were written.", writes.spared),
            (
                "delivered_bytes",
                "Bytes of arrays that devices have copied straight into memory of clients on this host.",
                scheduler.deliveries.delivered_bytes,
            ),
        ):
            yield CounterMetricFamily(f"gemmserve_{name}", text, value=value)
        if store.tier is not None:
            yield from _of_tier(store.tier)
        kept = [(worker.id, worker.kept) for worker in workers if worker.kept is not None]
        for name, text, field in (
            ("cache_bytes", "Bytes of copies of arrays and of what was prepared of them.", "used"),
            ("cache_budget_bytes", "Bytes that they may take.", "budget"),
            ("unwritten_bytes", "Bytes of results that are not in the store yet.", "unwritten"),
        ):
            yield _by_device(GaugeMetricFamily, name, text, kept, field)
        for name, text, field in (
            ("cache_hits", "Operands, and forms prepared of them, that were on the device.", "hits"),
            ("cache_misses", "Operands, and forms of them, that were not.", "misses"),
            ("cache_evictions", "Copies and prepared forms that had to go for others.", "evictions"),
        ):
            yield _by_device(CounterMetricFamily, name, text, kept, field)
        of_arena = [] if arena is None else [(worker.id, worker) for worker in workers]
        text = "Bytes of the memory for results that it copies to straight."
        yield _by_device(GaugeMetricFamily, "registered_bytes", text, of_arena, "registered_bytes")
        text = "Whether kernels of likely products are still being loaded ahead of the first one."
        yield _by_device(GaugeMetricFamily, "preparing", text, [(worker.id, worker) for worker in workers], "prepares")
        named = [(device.id, device) for device in devices]
        for name, text, field in (
            ("memory_used_bytes", "Device memory in use.", "memory_used"),
            ("memory_total_bytes", "Device memory.", "memory_total"),
            ("jobs_running", "Jobs that run on the device.", "jobs_running"),
        ):
            yield _by_device(GaugeMetricFamily, name, text, named, field)
        sensors = [(device.id, device.health) for device in devices]
        for name, text, field in (
            ("utilisation_ratio", "Share of time in which kernels ran, 0 to 1.", "utilisation"),
            (
                "memory_utilisation_ratio",
                "Share of time in which device memory was read or written, 0 to 1.",
                "memory_utilisation",
            ),
            ("power_watts", "Power that the device takes.", "power_watts"),
            ("power_limit_watts", "Power that it may take.", "power_limit_watts"),
            ("temperature_celsius", "Temperature.", "temperature_celsius"),
            ("clock_hertz", "Clock of the multiprocessors.", "clock_hertz"),
        ):
            yield _by_device(GaugeMetricFamily, name, text, sensors, field)
        family = GaugeMetricFamily(
            "gemmserve_device_warnings",
            "Warnings about the device: throttling, errors of memory, events of the driver; /v1/devices has the words.",
            labels=["device"],
        )
        for device, health in sensors:
            family.add_metric([device], len(health.warnings))
        yield family


@lru_cache(8)
def _series(op: str) -> list[tuple[str, str]]:
    """The series of an operation's phases."""
    return [(op, phase) for phase in _PHASES]


def _of_tier(tier: Tier) -> Iterator[Metric]:
    for name, text, value in (
        (
            "tier_bytes",
            "Bytes of arrays that are in the tier, whether in the store's files too or not.",
            tier.used_bytes,
        ),
        ("tier_arrays", "Arrays that are in the tier, likewise.", tier.arrays),
        ("tier_queue", "Requests for arrays that have not come back, and arrays that are leaving.", tier.waiting),
    ):
        yield GaugeMetricFamily(f"gemmserve_{name}", text, value=value)
    for name, text, value in (
        ("tier_out_bytes", "Bytes written to the tier.", tier.bytes_out),
        ("tier_in_bytes", "Bytes read from the tier.", tier.bytes_in),
        ("tier_failures", "Reads, writes and deletions in the tier that failed.", tier.failures),
    ):
        yield CounterMetricFamily(f"gemmserve_{name}", text, value=value)


def _by_device(
    kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, devices: Iterable[tuple[str, object]],
    field: str,
) -> Metric:  # fmt: skip
    """The metric of that field of each device's object, where it is known."""
    family = kind(f"gemmserve_device_{name}", text, labels=["device"])
    for device, each in devices:
        if (value := getattr(each, field)) is not None:
            family.add_metric([device], value)
    return family


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


class _Joined(Collector):
    """Counts and state of workers that joined."""

    def __init__(self, joined: JoinedExecutor) -> None:
        self._joined = joined

    def describe(self) -> list[Metric]:
        """Return nothing at registration, as above."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One snapshot."""
        joined, workers = self._joined.counts, self._joined.workers()
        ready = sum(worker.ready for worker in workers)
        family = GaugeMetricFamily("gemmserve_joined_workers", "Workers that joined over TCP.", labels=["state"])
        family.add_metric(["ready"], ready)
        family.add_metric(["away"], len(workers) - ready)
        yield family
        for name, text, value in (
            ("joins", "Links by which workers joined.", joined.joined),
            ("joins_refused", "Workers that were not let in.", joined.refused),
            ("joined_workers_lost", "Links of ready workers that ended.", joined.lost),
            ("join_fetched_bytes", "Bytes of operands that nodes were sent.", joined.fetched_bytes),
            ("join_returned_bytes", "Bytes of results that came from nodes.", joined.returned_bytes),
            ("stale_results", "Results that were refused: the work was somebody else's.", joined.stale_results),
        ):
            yield CounterMetricFamily(f"gemmserve_{name}", text, value=value)
        rates = [(worker.id, worker.link) for worker in workers if worker.link is not None]
        yield _by_device(
            GaugeMetricFamily, "link_bytes_per_second", "Rate of the link to it, as measured.", rates, "bytes_s"
        )
