"""Traces as a collector gets them: of the real server, with OpenTelemetry's own SDK and exporter."""

from __future__ import annotations

import signal
import uuid
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from gates import Gate
from live_server import LiveServer, until

from gemmserve import AsyncClient, Client

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="OpenTelemetry's SDK and exporter")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from trace_collector import Span, TraceCollector

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

SERVER, INTERNAL = 2, 1
CALLER = "00f067aa0ba902b7"
"""Span of the one who asks."""


@pytest.fixture(scope="module")
def collector() -> Iterator[TraceCollector]:
    with TraceCollector() as running:
        yield running


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    return Gate(tmp_path_factory.mktemp("gate") / "gate")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, collector: TraceCollector, gate: Gate) -> Iterator[LiveServer]:
    environment = {**collector.environment, **gate.environment, "GEMMSERVE_TRANSFER_PROCESSES": "1"}
    with LiveServer(data_dir=tmp_path_factory.mktemp("data"), environment=environment) as live:
        yield live


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def traced(*, sampled: bool = True) -> tuple[str, dict[str, str]]:
    """A trace's id, and the headers of a request that belongs to it."""
    trace_id = uuid.uuid4().hex
    return trace_id, {"traceparent": f"00-{trace_id}-{CALLER}-0{int(sampled)}"}


def npy(array: np.ndarray) -> bytes:
    from io import BytesIO

    stream = BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def one(spans: list[Span], name: str) -> Span:
    (found,) = [span for span in spans if span.name == name]
    return found


def children(spans: list[Span], parent: Span) -> list[Span]:
    return [span for span in spans if span.parent_id == parent.span_id]


def names(spans: list[Span]) -> list[str]:
    return [span.name for span in spans]


def check_times(spans: list[Span]) -> None:
    """Nothing ends before it begins, and phases lie within their parents, but for jobs, which outlive their requests;
    those of a worker are laid end to end."""
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        assert span.end_ns >= span.start_ns
        parent = by_id.get(span.parent_id)
        if parent is None:
            assert span.parent_id == CALLER
        elif span.name != "job":
            assert parent.start_ns - 1_000_000 <= span.start_ns
            assert span.end_ns <= parent.end_ns + 1_000_000
    for run in spans:
        if run.name == "run":
            for before, after in pairwise(children(spans, run)):
                assert after.start_ns >= before.end_ns - 1


@pytest.mark.parametrize(("size", "path"), [(48, "small"), (700, "asgi")])
def test_a_one_shot_has_its_phases(http: httpx.Client, collector: TraceCollector, size: int, path: str) -> None:
    a = np.random.default_rng(size).standard_normal((size, size)).astype(np.float32)
    files = {"a": npy(a), "b": npy(a)}
    assert (len(files["a"]) * 2 < 1 << 18) == (path == "small")
    for _ in range(2):  # the second one's head is known, but for the trace
        trace_id, headers = traced()
        answer = http.post("/v1/gemm", files=files, headers=headers)
        assert answer.status_code == 200

        spans = collector.wait_for(trace_id, "POST /v1/gemm", "run", "send")
        request = one(spans, "POST /v1/gemm")
        assert (request.kind, request.parent_id, request.failed, request.service) == (
            SERVER, CALLER, False, "gemmserve",
        )  # fmt: skip
        assert names(children(spans, request)) == ["receive", "queue", "run", "send"]
        run = one(spans, "run")
        assert names(children(spans, run)) == ["kernel"]
        assert request.attributes.items() >= {
            "http.request.method": "POST",
            "http.route": "/v1/gemm",
            "http.response.status_code": 200,
            "http.request.body.size": int(answer.request.headers["content-length"]),
            "http.response.body.size": len(answer.content),
            "url.path": "/v1/gemm",
            "url.scheme": "http",
            "client.address": "127.0.0.1",
            "gemmserve.op": "gemm",
            "gemmserve.m": size,
            "gemmserve.n": size,
            "gemmserve.k": size,
            "gemmserve.dtype": "float32",
            "gemmserve.compute": "auto",
            "gemmserve.algorithm": answer.headers["gemm-algorithm"],
            "gemmserve.device": "cpu",
            "gemmserve.request.id": answer.headers["x-request-id"],
        }.items()  # fmt: skip
        check_times(spans)
        # The phases' durations are those that the answer names.
        said = dict(part.split(";dur=") for part in answer.headers["server-timing"].split(", "))
        assert one(spans, "kernel").seconds * 1e3 == pytest.approx(float(said["kernel"]), abs=2e-3)


def test_an_upload_and_its_download(http: httpx.Client, collector: TraceCollector) -> None:
    body = npy(np.zeros((2048, 1024)))  # by a transfer process
    trace_id, headers = traced()
    made = http.post("/v1/arrays", content=body, headers={"content-type": "application/x-npy", **headers})
    assert made.status_code == 201
    spans = collector.wait_for(trace_id, "POST /v1/arrays")
    upload = one(spans, "POST /v1/arrays")
    assert names(children(spans, upload)) == ["receive", "send"]
    assert upload.attributes["http.request.body.size"] == len(body)
    check_times(spans)

    path = f"/v1/arrays/{made.json()['id']}"
    trace_id, headers = traced()
    assert len(http.get(f"{path}/data", headers=headers).content) == len(body)
    spans = collector.wait_for(trace_id, "GET /v1/arrays/{array_id}/data")
    download = one(spans, "GET /v1/arrays/{array_id}/data")
    assert download.attributes["http.response.body.size"] == len(body)
    assert names(children(spans, download)) == ["send"]

    trace_id, headers = traced()
    assert http.delete(path, headers=headers).status_code == 204  # a small request
    assert names(collector.wait_for(trace_id, "DELETE /v1/arrays/{array_id}", "send")) == [
        "DELETE /v1/arrays/{array_id}", "send",
    ]  # fmt: skip


@pytest.fixture
def operand(server: LiveServer) -> Iterator[str]:
    with Client(server.url) as client:
        handle = client.put(np.arange(64 * 64, dtype=np.float64).reshape(64, 64))
        yield handle.id


def submit(http: httpx.Client, operand: str, headers: dict[str, str]) -> str:
    answer = http.post("/v1/jobs", json={"op": "gemm", "a": operand, "b": operand}, headers=headers)
    assert answer.status_code == 202
    found: str = answer.json()["id"]
    return found


def test_a_job_outlives_its_request_and_is_seen_from_another(
    http: httpx.Client, collector: TraceCollector, gate: Gate, operand: str
) -> None:
    gate.shut()
    trace_id, headers = traced()
    job_id = submit(http, operand, headers)
    gate.wait_reached()
    spans = collector.wait_for(trace_id, "POST /v1/jobs", "send")
    assert names(spans) == ["POST /v1/jobs", "receive", "send"]  # the job is not over
    gate.open()
    looking, look = traced()
    assert http.get(f"/v1/jobs/{job_id}?wait=60", headers=look).json()["state"] == "succeeded"

    spans = collector.wait_for(trace_id, "job", "kernel")
    request, job = one(spans, "POST /v1/jobs"), one(spans, "job")
    assert job.parent_id == request.span_id
    assert request.links == (job.ids,)
    assert job.end_ns > request.end_ns
    assert names(children(spans, job)) == ["queue", "run"]
    assert (
        job.attributes.items()
        >= {
            "gemmserve.job.id": job_id,
            "gemmserve.job.state": "succeeded",
            "gemmserve.op": "gemm",
            "gemmserve.m": 64,
            "gemmserve.attempts": 1,
            "gemmserve.device": "cpu",
        }.items()
    )
    check_times(spans)
    (seen,) = [each for each in collector.wait_for(looking, "GET /v1/jobs/{job_id}") if each.parent_id == CALLER]
    assert seen.links == (job.ids,)
    later, look = traced()
    http.get(f"/v1/jobs/{job_id}", headers=look)
    assert one(collector.wait_for(later, "GET /v1/jobs/{job_id}"), "GET /v1/jobs/{job_id}").links == (job.ids,)


def test_a_worker_that_is_killed_is_an_attempt(
    http: httpx.Client, server: LiveServer, collector: TraceCollector, gate: Gate, operand: str
) -> None:
    gate.shut()
    trace_id, headers = traced()
    job_id = submit(http, operand, headers)
    gate.wait_reached()
    (worker,) = server.workers()
    worker.kill()
    gate.open()
    assert http.get(f"/v1/jobs/{job_id}?wait=60").json()["state"] == "succeeded"

    spans = collector.wait_for(trace_id, "job", "kernel")
    job = one(spans, "job")
    assert names(children(spans, job)) == ["queue", "run", "queue", "run"]
    lost, run = [span for span in spans if span.name == "run"]
    assert (lost.failed, lost.attributes["error.type"]) == (True, "worker-lost")
    assert not run.failed
    assert not job.failed
    assert job.attributes["gemmserve.attempts"] == 2
    assert names(children(spans, run)) == ["kernel"]
    assert not children(spans, lost)
    check_times(spans)


def test_a_job_goes_on_in_its_trace_after_the_whole_server_is_killed(tmp_path: Path, collector: TraceCollector) -> None:
    gate = Gate(tmp_path / "gate")
    options = {"data_dir": tmp_path / "data", "environment": {**collector.environment, **gate.environment}}
    with LiveServer(**options) as first, first.http() as http, Client(first.url) as client:
        operand = client.put(np.eye(32))
        gate.shut()
        trace_id, headers = traced()
        job_id = submit(http, operand.id, headers)
        gate.wait_reached()
        request = one(collector.wait_for(trace_id, "POST /v1/jobs"), "POST /v1/jobs")
        first.terminate(signal.SIGKILL)
    gate.open()
    with LiveServer(**options) as second, second.http() as http:
        assert http.get(f"/v1/jobs/{job_id}?wait=60").json()["state"] == "succeeded"
        spans = collector.wait_for(trace_id, "job")
        job = one(spans, "job")
        assert job.parent_id == request.span_id
        assert job.start_ns == pytest.approx(request.start_ns, abs=1e9)
        assert job.attributes["gemmserve.job.id"] == job_id
    with LiveServer(**options) as third, third.http() as http:  # the record knows the job's span
        looking, look = traced()
        http.get(f"/v1/jobs/{job_id}", headers=look)
        assert one(collector.wait_for(looking, "GET /v1/jobs/{job_id}"), "GET /v1/jobs/{job_id}").links == (job.ids,)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Spans of this process."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", lambda name, version=None: provider.get_tracer(name, version))
    return exporter


def check_the_clients(recorded: InMemorySpanExporter, collector: TraceCollector, *names: str) -> None:
    """The server's spans lie below the client's, and those below that of the test."""
    mine = next(span for span in recorded.get_finished_spans() if span.name == "mine")
    trace_id = f"{mine.context.trace_id:032x}"
    sent = {f"{span.context.span_id:016x}": span for span in recorded.get_finished_spans() if span is not mine}
    assert {span.parent.span_id for span in sent.values()} == {mine.context.span_id}
    until(lambda: {span.parent_id for span in collector.trace(trace_id) if span.kind == SERVER} == set(sent))
    for span in collector.wait_for(trace_id, *names):
        if span.kind != SERVER:
            continue
        parent = sent[span.parent_id]
        assert parent.attributes["http.response.status_code"] == span.attributes["http.response.status_code"]
        assert parent.attributes["gemmserve.request.id"] == span.attributes["gemmserve.request.id"]
        assert parent.name.partition("{")[0] == span.name.partition("{")[0]


def test_a_clients_spans_and_the_servers_are_one_trace(
    server: LiveServer, collector: TraceCollector, recorded: InMemorySpanExporter
) -> None:
    a = np.eye(40)
    with Client(server.url) as client, trace.get_tracer("test").start_as_current_span("mine"):
        client.gemm(a, a)
        with client.put(a) as ra, ra @ ra as product:
            product.numpy()
    check_the_clients(
        recorded,
        collector,
        "POST /v1/gemm",
        "POST /v1/arrays",
        "POST /v1/jobs",
        "job",
        "GET /v1/arrays/{array_id}/data",
    )


async def test_so_are_those_of_a_client_that_is_awaited(
    server: LiveServer, collector: TraceCollector, recorded: InMemorySpanExporter
) -> None:
    a = np.eye(40)
    async with AsyncClient(server.url) as client:
        with trace.get_tracer("test").start_as_current_span("mine"):
            await client.gemm(a, a)
            ra = await client.put(a)
            job = await client.submit("gemm", ra, ra)
            await job.result()
            await ra.delete()
    check_the_clients(recorded, collector, "POST /v1/gemm", "POST /v1/arrays", "POST /v1/jobs", "job")


def test_a_batch_is_one_product_of_many(http: httpx.Client, collector: TraceCollector) -> None:
    stack = npy(np.ones((5, 16, 16), np.float32))
    trace_id, headers = traced()
    answer = http.post("/v1/batch", files={"a": stack, "b": stack}, headers=headers)
    assert answer.status_code == 200, answer.text
    spans = collector.wait_for(trace_id, "POST /v1/batch", "run")
    request = one(spans, "POST /v1/batch")
    assert request.attributes["gemmserve.products"] == 5
    assert request.attributes["gemmserve.m"] == 16
    assert names(children(spans, request)) == ["receive", "queue", "run", "send"]
    check_times(spans)


def test_a_problem_is_told(http: httpx.Client, collector: TraceCollector) -> None:
    square, other = npy(np.ones((4, 4))), npy(np.ones((3, 3)))
    for files in ({"a": square, "b": other}, {"a": square, "b": npy(np.ones((300, 300)))}):
        trace_id, headers = traced()
        assert http.post("/v1/gemm", files=files, headers=headers).status_code == 422
        request = one(collector.wait_for(trace_id, "POST /v1/gemm"), "POST /v1/gemm")
        assert request.attributes["gemmserve.problem"] == "shape-mismatch"
        assert request.attributes["http.response.status_code"] == 422
        assert not request.failed  # it is the client's


def test_what_is_not_sampled_or_malformed_is_not_exported(http: httpx.Client, collector: TraceCollector) -> None:
    matrix = npy(np.eye(8))
    unsampled, headers = traced(sampled=False)
    trace_id = uuid.uuid4().hex
    wrong = [
        headers,
        {},
        {"traceparent": f"00-{trace_id}-{CALLER}-01-more"},
        {"traceparent": f"ff-{trace_id}-{CALLER}-01"},
        {"traceparent": f"00-{trace_id[:-1]}-{CALLER}-01"},
        {"traceparent": f"00-{'0' * 32}-{CALLER}-01"},
        {"traceparent": f"00-{trace_id.upper()}G-{CALLER}-01"},
        {"traceparent": "01"},
    ]
    for each in wrong:
        assert http.post("/v1/gemm", files={"a": matrix, "b": matrix}, headers=each).status_code == 200
        assert http.get("/v1/arrays", headers=each).status_code == 200
    known = {span.trace_id for span in collector.spans}
    last, headers = traced()
    http.get("/v1/arrays", headers=headers)
    collector.wait_for(last, "GET /v1/arrays")  # exported in their order: what came before would be here
    assert {span.trace_id for span in collector.spans} == known | {last}
    assert unsampled not in known


def test_exemplars_name_traces_where_openmetrics_is_asked_for(http: httpx.Client, collector: TraceCollector) -> None:
    matrix = npy(np.eye(8))
    trace_id, headers = traced()
    http.post("/v1/gemm", files={"a": matrix, "b": matrix}, headers=headers)
    collector.wait_for(trace_id, "POST /v1/gemm")
    said = http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}).text
    lines = [line for line in said.splitlines() if f'trace_id="{trace_id}"' in line]
    assert any('phase="kernel"' in line for line in lines)
    assert any(line.startswith("gemmserve_http_request_duration_seconds_bucket") for line in lines)
    plain = http.get("/metrics").text
    assert trace_id not in plain
    assert "gemmserve_job_phase_seconds_bucket" in plain


def test_a_share_of_what_says_nothing_begins_traces(tmp_path: Path, collector: TraceCollector) -> None:
    environment = {**collector.environment, "GEMMSERVE_TRACE_RATIO": "1", "OTEL_SERVICE_NAME": "products"}
    with LiveServer(data_dir=tmp_path, environment=environment) as server, server.http() as http:
        answer = http.get("/v1/arrays")
        unsampled, headers = traced(sampled=False)
        http.get("/v1/arrays", headers=headers)

        def found() -> list[Span]:
            request = answer.headers["x-request-id"]
            return [span for span in collector.spans if span.attributes.get("gemmserve.request.id") == request]

        until(found)
        (span,) = found()
        assert (span.parent_id, span.service) == ("", "products")
        assert f"trace_id={span.trace_id}" in server.text
    assert not collector.trace(unsampled)  # the end has exported everything


def test_a_collector_that_is_silent_or_gone_harms_nothing() -> None:
    matrix = npy(np.eye(8))
    with TraceCollector(answers=False) as silent:
        gone = {**silent.environment, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}  # "discard": nobody listens
        for environment in (silent.environment, gone):
            small = {"OTEL_BSP_MAX_QUEUE_SIZE": "64", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "8"}
            with LiveServer(environment={**environment, **small}) as server, server.http() as http:
                for _ in range(100):  # six spans each: several times what the queue holds
                    _, headers = traced()
                    assert http.post("/v1/gemm", files={"a": matrix, "b": matrix}, headers=headers).status_code == 200
