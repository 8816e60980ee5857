"""Client spans: one an exchange below the caller's span, its context in the request; nothing where nobody records."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from io import BytesIO

import numpy as np
import pytest

from gemmserve import AsyncClient, Client, RetryPolicy
from gemmserve._errors import APIError, TransportError
from gemmserve._transport.library import httpx

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry's SDK")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

ONCE = RetryPolicy(attempts=1)
JOB = "job_01jd2w7m4h8k3n5p6q9r0s1t2v"


@pytest.fixture
def exporter(monkeypatch):
    """Spans of a provider that is the process's for this test."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", lambda name, version=None: provider.get_tracer(name, version))
    return exporter


class Service:
    """A transport that answers a product, and keeps the requests."""

    def __init__(self, status=200):
        self.requests = []
        self.status = status

    def __call__(self, request):
        self.requests.append(request)
        if self.status == 0:
            raise httpx.ConnectError("refused")
        stream = BytesIO()
        np.save(stream, np.eye(2))
        headers = {"X-Request-Id": "abc", "Gemmserve-Exchange": request.headers["Gemmserve-Exchange"]}
        content, kind = stream.getvalue(), "application/x-npy"
        if self.status != 200:
            content, kind = b'{"type": "/problems/draining", "title": "-", "status": 503}', "application/problem+json"
        return httpx.Response(self.status, content=content, headers={**headers, "Content-Type": kind})

    @property
    def parents(self):
        return [request.headers.get("traceparent") for request in self.requests]


def client_of(service, **options):
    return Client("http://gemm.example:81", transport=httpx.MockTransport(service), retry=ONCE, **options)


def parent_of(span):
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-{span.context.trace_flags:02x}"


def test_an_exchange_is_a_span_below_the_callers(exporter):
    service = Service()
    with client_of(service) as client, trace.get_tracer("test").start_as_current_span("mine") as mine:
        client.gemm(np.eye(2), np.eye(2))
    (span,) = [span for span in exporter.get_finished_spans() if span.name != "mine"]
    assert (span.name, span.kind, span.parent) == ("POST /v1/gemm", trace.SpanKind.CLIENT, mine.get_span_context())
    assert service.parents == [parent_of(span)]
    assert span.attributes == {
        "http.request.method": "POST",
        "server.address": "gemm.example",
        "server.port": 81,
        "url.full": "http://gemm.example:81/v1/gemm",
        "url.template": "/v1/gemm",
        "http.request.body.size": int(service.requests[0].headers["content-length"]),
        "http.response.status_code": 200,
        "gemmserve.request.id": "abc",
    }
    assert span.status.is_unset


async def test_so_it_is_where_it_is_awaited(exporter):
    service = Service()
    transport = httpx.MockTransport(service)
    async with AsyncClient("http://gemm.example", transport=transport, retry=ONCE) as client:
        with trace.get_tracer("test").start_as_current_span("mine"):
            await client.gemm(np.eye(2), np.eye(2))
    (span,) = [span for span in exporter.get_finished_spans() if span.name != "mine"]
    assert service.parents == [parent_of(span)]


@pytest.mark.parametrize("cell", ["", "_7", "_255"])
def test_ids_are_no_part_of_a_name(exporter, cell):
    service = Service(status=503)
    with client_of(service) as client, trace.get_tracer("test").start_as_current_span("mine"), pytest.raises(APIError):
        client.job(JOB + cell)
    span = exporter.get_finished_spans()[0]
    assert span.name == "GET /v1/jobs/{id}"
    assert span.attributes["url.full"].endswith(f"/v1/jobs/{JOB}{cell}")
    assert not span.status.is_ok
    assert span.attributes["error.type"] == "503"


def test_what_breaks_is_an_error(exporter):
    with (
        client_of(Service(status=0)) as client,
        trace.get_tracer("test").start_as_current_span("mine"),
        pytest.raises(TransportError),
    ):
        client.gemm(np.eye(2), np.eye(2))
    assert exporter.get_finished_spans()[0].attributes["error.type"] == "ConnectError"


def test_to_leave_events_is_none(exporter):
    def service(request):
        info = {
            "id": JOB,
            "op": "gemm",
            "state": "running",
            "created_at": "2026-01-01T00:00:00Z",
        }
        headers = {"Gemmserve-Exchange": request.headers["Gemmserve-Exchange"], "Content-Type": "application/json"}
        if not request.url.path.endswith("/events"):
            return httpx.Response(200, json=info, headers=headers)
        text = f"event: state\ndata: {json.dumps(info)}\n\n" * 2
        return httpx.Response(200, text=text, headers={**headers, "Content-Type": "text/event-stream"})

    with (
        client_of(service) as client,
        trace.get_tracer("test").start_as_current_span("mine"),
        closing(client.job(JOB).events()) as events,
    ):
        next(events)
    assert [span.name for span in exporter.get_finished_spans()][1] == "GET /v1/jobs/{id}/events"
    assert [span.attributes.get("error.type") for span in exporter.get_finished_spans()] == [None] * 3


def test_nothing_is_added_where_no_span_records(exporter):
    service = Service()
    quiet = TracerProvider(sampler=ALWAYS_OFF).get_tracer("test")
    with client_of(service) as client:
        client.gemm(np.eye(2), np.eye(2))
        with quiet.start_as_current_span("not sampled"):
            client.gemm(np.eye(2), np.eye(2))
    assert service.parents == [None, None]
    assert not exporter.get_finished_spans()


def test_nothing_is_imported_for_it():
    script = (
        "import sys, gemmserve\n"
        "c = gemmserve.Client('http://127.0.0.1:9', retry=gemmserve.RetryPolicy(attempts=1))\n"
        "try:\n    c.arrays()\nexcept Exception:\n    pass\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
