"""Prometheus metrics of one app, prefix ``gemmserve_``: counters fed by events, gauges read from the core at scrape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from gemmserve_service.core import Core
    from gemmserve_service.schemas import JobInfo
    from gemmserve_service.single import EndedJob

# Seconds from a kernel of 100 us to a queue of minutes, a factor of about 3 apart.
_SECONDS: Final = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3, 10, 30, 100, 300)

_RESIDUALS: Final = (1e-17, 1e-16, 1e-15, 1e-14, 1e-12, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1)


class Metrics:
    """The app's own registry; an observer of the core's jobs and of the middleware's requests."""

    def __init__(self, core: Core) -> None:
        self.registry = CollectorRegistry()
        self._jobs = Counter(
            "gemmserve_jobs", "Jobs by the state they entered.", ["op", "algorithm", "state"], registry=self.registry
        )
        self._phases = Histogram(
            "gemmserve_job_phase_seconds",
            "Seconds of finished jobs by phase.",
            ["op", "phase"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._residuals = Histogram(
            "gemmserve_job_residual",
            "Relative errors that checks found, by algorithm.",
            ["algorithm"],
            buckets=_RESIDUALS,
            registry=self.registry,
        )
        self._mismatches = Counter(
            "gemmserve_job_mismatches",
            "Results that a check found wrong; they were computed again in plain arithmetic.",
            ["algorithm"],
            registry=self.registry,
        )
        self._flops = Counter(
            "gemmserve_flops",
            "Floating-point operations of succeeded jobs (complex: 8 m n k).",
            ["op"],
            registry=self.registry,
        )
        self._job_bytes = Counter(
            "gemmserve_job_bytes", "Bytes of operands and results of succeeded jobs.", ["op"], registry=self.registry
        )
        self._requests = Counter(
            "gemmserve_http_requests", "Requests answered.", ["route", "method", "status"], registry=self.registry
        )
        self._durations = Histogram(
            "gemmserve_http_request_duration_seconds",
            "From the first byte of the request to the last of the answer.",
            ["route", "method"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._received = Counter("gemmserve_http_received_bytes", "Bytes of request bodies.", registry=self.registry)
        self._sent = Counter("gemmserve_http_sent_bytes", "Bytes of answer bodies.", registry=self.registry)
        self._refused_connections = Counter(
            "gemmserve_http_refused_connections",
            "Connections that were refused or cut off before a request of theirs reached a route.",
            ["problem"],
            registry=self.registry,
        )
        self._batches = Histogram(
            "gemmserve_batch_size",
            "Products that a worker was sent together.",
            buckets=(1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096, 16_384),
            registry=self.registry,
        )
        self._children: dict[tuple[Any, ...], Any] = {}
        """By metric and labels; there are as many as in the registry."""
        core.scheduler.group_sent = self.batch_sent
        self.registry.register(_Gauges(core))

    def job_changed(self, job: JobInfo | EndedJob, nbytes: int, flops: int) -> None:
        """`Observer`: counts the state; adds times, bytes and operations once the job has succeeded."""
        self._of(self._jobs, job.op, job.algorithm or "none", job.state.value).inc()
        if job.timings is not None and job.state.final:
            for phase, seconds in (
                ("queue", job.timings.queue_s),
                ("h2d", job.timings.h2d_s),
                ("kernel", job.timings.kernel_s),
                ("d2h", job.timings.d2h_s),
            ):
                self._of(self._phases, job.op, phase).observe(seconds)
        if job.residual is not None:
            self._residuals.labels(job.algorithm or "none").observe(job.residual)
        if job.mismatch is not None:
            self._mismatches.labels(job.algorithm or "none").inc()
        if job.state == "succeeded":
            self._of(self._flops, job.op).inc(flops)
            self._of(self._job_bytes, job.op).inc(nbytes)

    def batch_sent(self, size: int) -> None:
        """Counts what a worker was sent at one time: so many products."""
        self._batches.observe(size)

    def _of(self, metric: Any, *labels: Any) -> Any:
        """`metric.labels`, which takes several times as long as counting does."""
        key = (id(metric), *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return child

    def request_done(self, route: str, method: str, status: int, *, seconds: float, received: int, sent: int) -> None:
        """Counts one request; `route` is a template such as /v1/arrays/{array_id}, never a path."""
        self._of(self._requests, route, method, status).inc()
        self._of(self._durations, route, method).observe(seconds)
        self._received.inc(received)
        self._sent.inc(sent)

    def connection_refused(self, problem: str) -> None:
        """Counts one; `problem` is the slug of the reason."""
        self._refused_connections.labels(problem).inc()

    def render(self, accept: str | None) -> tuple[bytes, str]:
        """The exposition and its content type: OpenMetrics where `accept` asks for it, else Prometheus text."""
        encode, content_type = choose_encoder(accept or "")
        return encode(self.registry), content_type


class _Gauges(Collector):
    """What the core says of itself when it is scraped."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def describe(self) -> list[Metric]:
        """Nothing to collect at registration: the core may not have started."""
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
        used = GaugeMetricFamily("gemmserve_device_memory_used_bytes", "Device memory in use.", labels=["device"])
        total = GaugeMetricFamily("gemmserve_device_memory_total_bytes", "Device memory.", labels=["device"])
        running = GaugeMetricFamily("gemmserve_device_jobs_running", "Jobs that run on the device.", labels=["device"])
        for device in now.devices:
            used.add_metric([device.id], device.memory_used)
            total.add_metric([device.id], device.memory_total)
            running.add_metric([device.id], device.jobs_running)
        yield from (used, total, running)
