"""Spans of requests on their ways: names, attributes, errors, and no span of anybody else's."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest

from gemmserve_service.jobs.core import Core
from gemmserve_service.runtime.tracing.spans import Tracing

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry's SDK")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TRACED = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}

_STREAM = io.BytesIO()
np.save(_STREAM, np.eye(4))
NPY = _STREAM.getvalue()


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter, monkeypatch):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # As if it were the process's: what else is there that makes spans, FastAPI's telemetry above all, would use it.
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return provider


@pytest.fixture
async def core(settings, spy, provider):
    return Core(settings, spy, None, Tracing(provider.get_tracer("test"), 0.0))


def request_span(exporter):
    (found,) = [span for span in exporter.get_finished_spans() if span.kind is trace.SpanKind.SERVER]
    return found


async def test_a_path_that_nobody_knows_is_in_no_name(client, exporter):
    await client.get("/v1/secrets?key=hush", headers=TRACED)
    span = request_span(exporter)
    assert span.name == "GET"
    assert "http.route" not in span.attributes
    assert span.attributes["url.path"] == "/v1/secrets"
    assert span.attributes["gemmserve.problem"] == "not-found"
    assert span.status.is_unset
    assert "hush" not in span.to_json()


async def test_a_method_that_nobody_knows(client, exporter):
    await client.request("BREW", "/v1/arrays", headers=TRACED)
    span = request_span(exporter)
    assert span.name.startswith("HTTP")
    assert span.attributes["http.request.method"] == "_OTHER"
    assert span.attributes["http.request.method_original"] == "BREW"


async def test_an_error_of_the_server_is_one(client, exporter, app, monkeypatch):
    async def fail(**_):
        raise RuntimeError("bug")

    monkeypatch.setattr(app.state.core.jobs, "list", fail)
    assert (await client.get("/v1/jobs", headers=TRACED)).status_code == 500
    span = request_span(exporter)
    assert not span.status.is_ok
    assert not span.status.is_unset
    assert span.attributes["error.type"] == "internal"
    assert span.attributes["http.response.status_code"] == 500


async def test_a_refused_key_is_traced_and_not_shown(client, exporter, make_key):
    make_key()
    headers = {"Authorization": "Bearer gs_wrong", **TRACED}
    assert (await client.get("/v1/jobs", headers=headers)).status_code == 401
    assert request_span(exporter).attributes["gemmserve.problem"] == "unauthorized"
    assert "gs_wrong" not in request_span(exporter).to_json()


async def test_nobody_else_makes_spans(client, exporter):
    await client.get("/v1/jobs")  # neither of ours, nor FastAPI's
    assert not exporter.get_finished_spans()
    await client.get("/v1/jobs", headers=TRACED)
    assert sorted(span.name for span in exporter.get_finished_spans()) == ["GET /v1/jobs", "send"]


async def test_a_job_says_nothing_of_its_trace(client, exporter):
    array = (await client.post("/v1/arrays", content=NPY, headers={"Content-Type": "application/x-npy"})).json()["id"]
    answer = await client.post("/v1/jobs", json={"op": "gemm", "a": array, "b": array}, headers=TRACED)
    assert answer.status_code == 202
    assert not answer.json().keys() & {"trace", "traceparent"}
    assert "trace" not in json.dumps((await client.get("/openapi.json")).json()["components"]["schemas"]["JobInfo"])
