"""Spans from recorded times: phases end to end, lost workers as attempts, what comes after the end."""

from __future__ import annotations

import time

import pytest

from gemmserve_service.runtime.tracing.spans import REQUEST, TRACEPARENT, Tracing, link_job, product_trace
from gemmserve_service.schemas import Timings

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry's SDK")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, TraceIdRatioBased

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def make(exporter):
    def make(ratio=0.0, sampler=None):
        provider = TracerProvider(sampler=sampler)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        return Tracing(provider.get_tracer("test"), ratio)

    return make


def begin(tracing, traceparent="", tracestate=""):
    valid = TRACEPARENT.fullmatch(traceparent) is not None
    if not tracing.wanted(traceparent, valid=valid):
        return None
    return tracing.begin(traceparent if valid else "", tracestate, {"http.request.method": "GET"})


@pytest.mark.parametrize(
    ("traceparent", "valid"),
    [
        (PARENT, True),
        (PARENT[:-2] + "00", True),
        ("01" + PARENT[2:] + "-of a later version", True),
        (PARENT + "-more", False),
        ("ff" + PARENT[2:], False),
        (PARENT.replace("a", "0"), False),
        (PARENT.replace("b", "0"), False),
        (PARENT.upper(), False),
        (PARENT[:-1], False),
        (PARENT[:-1] + "g", False),
        (" " + PARENT, False),
    ],
)
def test_a_traceparent(traceparent, valid):
    assert (TRACEPARENT.fullmatch(traceparent) is not None) == valid


def test_which_requests_are_traced(make):
    tracing = make()
    assert begin(tracing) is None
    assert begin(tracing, PARENT[:-2] + "00") is None
    assert begin(tracing, PARENT[:-2] + "02") is None  # another flag
    assert begin(tracing, PARENT).traceparent.split("-")[1] == "a" * 32
    assert begin(tracing, PARENT[:-2] + "03") is not None
    always = make(ratio=1.0)
    assert begin(always, "malformed").traceparent.split("-")[1] != "a" * 32
    assert begin(always, PARENT[:-2] + "00") is None  # whoever asks has decided


def test_the_share_is_one_of_requests_that_say_nothing(make):
    tracing = make(ratio=0.3)
    tracing._chance.seed(1)
    share = sum(begin(tracing) is not None for _ in range(2000)) / 2000
    assert abs(share - 0.3) < 5 * (0.3 * 0.7 / 2000) ** 0.5


def test_the_sampler_has_the_last_word(make):
    assert begin(make(ratio=1.0, sampler=ALWAYS_OFF), PARENT) is None
    assert begin(make(ratio=1.0, sampler=TraceIdRatioBased(0.0)), PARENT) is None


def test_a_state_goes_along(make, exporter):
    trace = begin(make(), PARENT, "vendor=7")
    trace.end("GET", {}, None, 0.0)
    assert exporter.get_finished_spans()[0].context.trace_state.get("vendor") == "7"


def spans_of(exporter):
    return sorted(exporter.get_finished_spans(), key=lambda span: span.start_time)


def seconds(span):
    return (span.end_time - span.start_time) / 1e9


def test_phases_are_laid_end_to_end_behind_the_wait_in_the_group(make, exporter):
    trace = begin(make(), PARENT)
    product = trace.product()
    start = time.monotonic() - 10.0
    product.submitted(start, {})
    product.started("cuda:0", start + 2.0)
    product.ended(timings=Timings(queue_s=5.0, h2d_s=1.0, kernel_s=0.5, verify_s=0.25), algorithm="simt")
    trace.end("GET", {}, None, 0.0)
    found = {span.name: span for span in spans_of(exporter)}
    assert seconds(found["queue"]) == pytest.approx(2.0)
    assert [name for name in found if name in {"compile", "h2d", "kernel", "d2h", "verify"}] == [
        "h2d", "kernel", "verify",
    ]  # fmt: skip
    run = found["run"]
    assert (found["h2d"].start_time - run.start_time) / 1e9 == pytest.approx(3.0)  # behind others of its group
    assert seconds(found["h2d"]) == pytest.approx(1.0)
    assert found["kernel"].start_time == pytest.approx(found["h2d"].end_time, abs=2)
    assert found["verify"].end_time <= run.end_time
    assert found["GET"].attributes["gemmserve.algorithm"] == "simt"


def test_what_a_worker_says_it_waited_moves_no_phase_past_its_answer(make, exporter):
    trace = begin(make(), PARENT)
    product = trace.product()
    now = time.monotonic()
    product.submitted(now - 2.0, {})
    product.started("cpu", now - 1.0)
    product.ended(timings=Timings(queue_s=100.0, kernel_s=0.5))
    trace.end("GET", {}, None, 0.0)
    found = {span.name: span for span in spans_of(exporter)}
    assert found["kernel"].end_time <= found["run"].end_time + 2


def test_a_job_has_its_attempts_and_what_comes_after(make, exporter):
    tracing = make()
    trace = begin(tracing, PARENT)
    job = trace.job(time.monotonic())
    job.submitted(time.monotonic(), {"gemmserve.op": "gemm"})
    job.started("cuda:0", time.monotonic())
    job.lost()
    job.requeued()
    trace.end("POST", {}, None, 0.0)
    assert [span.name for span in spans_of(exporter)] == ["POST"]
    job.started("cuda:1", time.monotonic())
    job.ended(timings=Timings(kernel_s=0.1), algorithm="wgmma")
    job.end("succeeded")
    job.written("copy")
    job.written("write")
    spans = {span.name: span for span in spans_of(exporter)}
    names = sorted(span.name for span in spans_of(exporter))
    assert names == ["POST", "copy", "job", "kernel", "queue", "queue", "run", "run", "write"]
    assert spans["job"].parent.span_id == spans["POST"].context.span_id
    assert spans["POST"].links[0].context.span_id == spans["job"].context.span_id
    assert spans["copy"].parent.span_id == spans["write"].parent.span_id == spans["job"].context.span_id
    assert spans["job"].attributes["gemmserve.device"] == "cuda:1"
    assert spans["job"].attributes["gemmserve.attempts"] == 2


def test_a_job_that_fails_before_it_is_queued(make, exporter):
    job = make().resumed(PARENT, 1e9)
    job.end("failed")
    (span,) = spans_of(exporter)
    assert span.start_time == 10**18
    assert not span.status.is_ok
    assert f"{span.context.trace_id:032x}" == "a" * 32


def test_a_job_that_is_cancelled_is_no_error(make, exporter):
    job = begin(make(), PARENT).job(time.monotonic())
    job.submitted(time.monotonic(), {})
    job.ended()
    job.end("cancelled")
    job_span = next(span for span in spans_of(exporter) if span.name == "job")
    assert job_span.status.is_unset
    assert job_span.attributes["gemmserve.job.state"] == "cancelled"


def test_links_are_bounded_and_single(make, exporter):
    trace = begin(make(), PARENT)
    assert product_trace() is None
    token = REQUEST.set(trace)
    try:
        for number in range(1, 100):
            for _ in range(2):
                link_job(f"00-{'c' * 32}-{number:016x}-01")
        assert product_trace() is not None
    finally:
        REQUEST.reset(token)
    trace.end("GET", {}, None, 0.0)
    links = next(span for span in spans_of(exporter) if span.name == "GET").links
    assert [link.context.span_id for link in links] == list(range(1, 33))
