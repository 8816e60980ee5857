"""Devices, use, health, metrics and problem types through the app."""

from __future__ import annotations

import json

import numpy as np
import pytest
from inline_executor import InlineExecutor
from prometheus_client.parser import text_string_to_metric_families


async def test_devices(client):
    (device,) = (await client.get("/v1/devices")).json()["devices"]
    assert (device["id"], device["state"]) == ("cpu", "ready")
    assert {"auto", "fp32", "fp64"} <= set(device["compute_modes"])
    assert device["memory_total"] > 0
    assert device["verified_error"] < 1e-3


async def test_usage_counts_what_is_stored(client, put):
    before = (await client.get("/v1/usage")).json()
    await put(np.ones((10, 10)))
    after = (await client.get("/v1/usage")).json()
    assert (after["arrays"] - before["arrays"], after["store_bytes"] - before["store_bytes"]) == (1, 800)
    assert after["max_array_bytes"] == 1 << 30


@pytest.mark.parametrize("path", ["/livez", "/healthz", "/readyz"])
async def test_alive_and_ready(client, path):
    answer = await client.get(path)
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    assert answer.headers["cache-control"] == "no-store"


async def test_without_a_worker_it_lives_and_is_not_ready(client, spy, problem):
    spy.workers()[0].ready = False
    document = problem(await client.get("/readyz"), 503, "not-ready")
    assert document["reasons"] == ["no worker has answered a verified product"]
    assert (await client.get("/readyz")).headers["retry-after"] == "1"
    assert (await client.get("/livez")).status_code == 200


async def test_draining_is_not_ready_and_takes_nothing(client, core, put, problem):
    job = {"op": "gemm", "a": await put(np.eye(2)), "b": await put(np.eye(2))}
    await core.drain(1)
    problem(await client.get("/readyz"), 503, "draining")
    answer = await client.post("/v1/jobs", json=job)
    problem(answer, 503, "draining")
    assert "retry-after" in answer.headers
    assert (await client.get("/livez")).status_code == 200


async def samples(client):
    text = (await client.get("/metrics")).text
    found = {
        (sample.name, frozenset(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return lambda name, *labels: found[f"gemmserve_{name}", frozenset(labels)]


async def test_metrics(client, put):
    job = {"op": "gemm", "a": await put(np.ones((8, 4), "c8")), "b": await put(np.ones((4, 2), "c8"))}
    info = (await client.post("/v1/jobs", json=job, headers={"Prefer": "wait=60"})).json()
    await client.get("/v1/arrays/nonsense")
    await client.get("/no/such/path")
    now = await samples(client)
    assert now("jobs_total", info["algorithm"], "gemm", "succeeded") == 1
    assert now("flops_total", "gemm") == 8 * 8 * 4 * 2
    assert now("job_bytes_total", "gemm") == 8 * (8 * 4 + 4 * 2 + 8 * 2)
    assert now("job_phase_seconds_count", "gemm", "kernel") == 1
    assert now("queue_depth") == 0
    assert now("array_store_arrays") == 3
    assert now("array_store_bytes") == 8 * (8 * 4 + 4 * 2 + 8 * 2)
    assert now("ready") == 1
    assert now("worker_restarts_total") == 0
    assert now("device_memory_total_bytes", "cpu") > 0
    assert now("http_requests_total", "/v1/arrays", "201", "POST") == 2
    assert now("http_requests_total", "/v1/arrays/{array_id}", "404", "GET") == 1
    assert now("http_requests_total", "404", "GET", "unmatched") == 1
    assert now("http_request_duration_seconds_count", "/v1/jobs", "POST") == 1
    assert now("http_received_bytes_total") > 8 * (8 * 4 + 4 * 2)


async def test_metrics_in_openmetrics(client):
    answer = await client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


async def test_each_app_has_its_own_metrics(make_settings, tmp_path, client):
    from gemmserve_service.http.app import create_app
    from gemmserve_service.jobs.core import Core

    settings = make_settings(data_dir=tmp_path / "other")
    other = create_app(settings, Core(settings, InlineExecutor()))
    assert other.state.metrics.registry is not client._transport.app.state.metrics.registry


async def test_problem_types_are_documented(client, problem):
    listed = (await client.get("/problems")).json()
    assert {"shape-mismatch", "not-found", "queue-full", "invalid-npy", "timeout", "host-not-allowed"} <= listed.keys()
    for slug, document in listed.items():
        assert document["type"] == f"/problems/{slug}"
        assert document["title"]
        assert len(document["detail"]) > 10
        assert (await client.get(f"/problems/{slug}")).json() == document
    problem(await client.get("/problems/no-such"), 404, "not-found")


async def test_every_error_that_is_sent_is_in_the_catalogue(client):
    listed = (await client.get("/problems")).json()
    for path in ("/nope", "/v1/arrays?limit=0", "/v1/jobs/x"):
        document = json.loads((await client.get(path)).content)
        slug = document["type"].removeprefix("/problems/")
        assert listed[slug]["status"] == document["status"]
