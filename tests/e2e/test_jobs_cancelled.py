"""Jobs that are cancelled, or whose time passes, while they wait and while they run.

What has to be running still is a program of hundreds of teraflop for the one thread that the server computes with: no
processor is through with it before the test is.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from live_server import until

from gemmserve import JobCancelled

N, STEPS = 2048, 1000


@pytest.fixture(scope="module")
def big(server) -> str:
    with server.http() as http:
        headers = {"Content-Type": "application/octet-stream"}
        query = {"dtype": "complex128", "shape": f"{N},{N}"}
        answer = http.post("/v1/arrays", params=query, content=bytes(16 * N * N), headers=headers)
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]


@pytest.fixture
def http(server):
    with server.http() as connected:
        yield connected


@pytest.fixture
def endless(http, big):
    """Submits a program that does not end by itself."""
    steps = [{"id": "x0", "op": "gemm", "a": big, "b": big}]
    steps += [{"id": f"x{n}", "op": "gemm", "a": big, "b": f"$x{n - 1}"} for n in range(1, STEPS)]
    program = {"op": "program", "steps": steps, "keep": [f"x{STEPS - 1}"]}
    submitted = []

    def submit(headers=None, **fields):
        answer = http.post("/v1/jobs", json={**program, **fields}, headers=headers or {})
        submitted.append(answer.json()["id"])
        return answer

    yield submit
    for job_id in submitted:
        http.delete(f"/v1/jobs/{job_id}")


def state(http, job_id: str, wait_s: float = 0) -> dict:
    return http.get(f"/v1/jobs/{job_id}", params={"wait": wait_s}).json()


def is_free(client) -> bool:
    """Whether the worker still does what it is given."""
    small = client.put(np.eye(4))
    return np.array_equal((small @ small).numpy(), np.eye(4))


def test_while_it_waits_and_while_it_runs(http, big, client, endless) -> None:
    refused = http.post("/v1/jobs", json={"op": "gemm", "a": big, "b": client.put(np.eye(8)).id}).json()
    assert "shape" in json.dumps(refused)  # at once: nothing that cannot run is queued
    running = endless().json()["id"]
    until(lambda: state(http, running)["state"] == "running")
    waiting = endless(priority=-1).json()["id"]  # behind it: no short one, which would be let by

    assert http.delete(f"/v1/jobs/{waiting}").status_code in {200, 202}
    cancelled = state(http, waiting, 30)
    assert (cancelled["state"], cancelled["attempt"]) == ("cancelled", 0), "it never ran"
    assert state(http, running)["state"] == "running"
    assert http.delete(f"/v1/jobs/{running}").status_code in {200, 202}
    cancelled = state(http, running, 30)
    assert (cancelled["state"], cancelled["attempt"]) == ("cancelled", 1)
    assert not cancelled.get("result")
    with pytest.raises(JobCancelled):
        client.job(running).result()
    assert is_free(client), "the worker goes on after a cancelled job"


def test_a_deadline_is_kept(http, client, endless) -> None:
    answer = endless({"Prefer": "wait=60"}, timeout_s=0.2)
    job = state(http, answer.json()["id"], 60)
    assert job["state"] == "expired"
    assert job["error"]["type"].endswith("/timeout")
    assert is_free(client)


def test_a_deadline_of_one_that_waits(http, endless) -> None:
    running = endless().json()["id"]
    until(lambda: state(http, running)["state"] == "running")
    waiting = state(http, endless(priority=-1, timeout_s=0.2).json()["id"], 60)
    assert (waiting["state"], waiting["attempt"]) == ("expired", 0)
    assert state(http, running)["state"] == "running"
