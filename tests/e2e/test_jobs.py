"""Jobs over plain HTTP: long poll, events, idempotency."""

from __future__ import annotations

import io
import json
import time

import numpy as np
import pytest


@pytest.fixture
def http(server):
    with server.http() as connected:
        yield connected


def upload(http, array: np.ndarray) -> str:
    body = io.BytesIO()
    np.save(body, array)
    answer = http.post("/v1/arrays", content=body.getvalue(), headers={"Content-Type": "application/x-npy"})
    assert answer.status_code == 201, answer.text
    assert answer.headers["Location"].endswith(answer.json()["id"])
    return answer.json()["id"]


@pytest.fixture
def small(http) -> str:
    return upload(http, np.eye(8, dtype=np.complex64))


def submit(http, a: str, b: str, headers: dict[str, str] | None = None, **fields):
    return http.post("/v1/jobs", json={"op": "gemm", "a": a, "b": b, **fields}, headers=headers or {})


def test_202_then_long_poll(http, small) -> None:
    answer = submit(http, small, small)
    assert answer.status_code == 202
    job = http.get(answer.headers["Location"], params={"wait": 60}).json()
    assert job["state"] == "succeeded"
    assert job["attempt"] == 1
    assert job["algorithm"] == "numpy"
    assert set(job["result"]) == {"d"}
    assert job["timings"]["kernel_s"] > 0


def test_prefer_wait_answers_200(http, small) -> None:
    answer = submit(http, small, small, {"Prefer": "wait=60"})
    assert answer.status_code == 200
    assert "wait" in answer.headers["Preference-Applied"]
    assert answer.json()["state"] == "succeeded"


def test_events_end_with_the_final_state(http, small) -> None:
    job = submit(http, small, small).json()
    with http.stream("GET", f"/v1/jobs/{job['id']}/events") as stream:
        assert stream.headers["Content-Type"].startswith("text/event-stream")
        states = [json.loads(line[5:])["state"] for line in stream.iter_lines() if line.startswith("data:")]
    assert states[-1] == "succeeded"
    assert [state for state in ("queued", "running", "succeeded") if state in states] == states


def test_an_idempotency_key_makes_one_job(http, small) -> None:
    key = {"Idempotency-Key": f"test-{time.time_ns()}"}
    first, second = submit(http, small, small, key), submit(http, small, small, key)
    assert first.json()["id"] == second.json()["id"]
    assert submit(http, small, small, key, alpha=2).status_code == 422


def test_deleting_an_operand_does_not_stop_its_job(http, random_complex) -> None:
    a = random_complex(64, 64)
    operand = upload(http, a)
    job = submit(http, operand, operand).json()
    assert http.delete(f"/v1/arrays/{operand}").status_code == 204
    job = http.get(f"/v1/jobs/{job['id']}", params={"wait": 60}).json()
    assert job["state"] == "succeeded"
    data = http.get(f"/v1/arrays/{job['result']['d']}/data", headers={"Accept": "application/x-npy"}).content
    np.testing.assert_allclose(np.load(io.BytesIO(data)), a @ a, rtol=1e-4, atol=1e-4)
    assert http.get(f"/v1/arrays/{operand}").status_code == 404


def test_metrics_count_jobs(http, small) -> None:
    submit(http, small, small, {"Prefer": "wait=60"})
    text = http.get("/metrics").text
    assert "gemmserve_jobs_total{" in text
    assert 'op="gemm"' in text
    assert 'state="succeeded"' in text


def test_health_routes(http) -> None:
    assert http.get("/livez").status_code == 200
    assert http.get("/healthz").status_code == 200
    assert http.get("/readyz").status_code == 200
    assert http.get("/docs").status_code == 200
    devices = http.get("/v1/devices").json()
    assert "cpu" in json.dumps(devices)
