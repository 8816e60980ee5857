"""A real server, killed when a worker is through with a job that is not on record: nobody was told of it."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
from live_server import LiveServer, until

from gemmserve import Client

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture
def hold(tmp_path):
    """While this file is there, nothing is committed."""
    return tmp_path / "hold"


@pytest.fixture
def start(tmp_path, hold):
    environment = {"PYTHONPATH": str(SUPPORT / "held_commits"), "GEMMSERVE_TEST_HOLD": str(hold)}
    return lambda: LiveServer(data_dir=tmp_path / "data", environment=environment)


def succeeded(server):
    """Jobs whose end the front has heard of: what a device was busy with is counted then."""
    with server.http() as http:
        return http.get("/v1/usage").json()["quotas"]["device_seconds_per_day"]["used"] > 0


@pytest.mark.parametrize("wait", [False, True])
def test_kill_9_between_the_work_and_the_record(tmp_path, start, hold, wait):
    headers = {"Idempotency-Key": "once"} | ({"Prefer": "wait=60"} if wait else {})
    a = np.arange(1.0, 10.0).reshape(3, 3)
    answers = []
    with start() as server, Client(server.url) as client:
        operand = client.put(a)
        job = {"op": "gemm", "a": operand.id, "b": operand.id}
        assert not succeeded(server)
        hold.touch()

        def submit():
            try:
                answers.append(
                    httpx.post(f"{server.url}/v1/jobs", json=job, headers=headers, timeout=120, trust_env=False)
                )
            except httpx.HTTPError as error:
                answers.append(error)

        submission = threading.Thread(target=submit)
        submission.start()
        until(lambda: succeeded(server))
        with httpx.Client(timeout=120, trust_env=False) as http:
            again = http.post(f"{server.url}/v1/jobs", json=job, headers=headers)
        assert again.status_code == 409  # the first one's fate is open
        assert answers == []
        server.terminate(signal.SIGKILL)
        submission.join(120)
    (answer,) = answers
    assert isinstance(answer, httpx.HTTPError)  # it was told nothing
    hold.unlink()
    with contextlib.closing(sqlite3.connect(tmp_path / "data" / "gemmserve.sqlite")) as database:
        for table in ("jobs", "idempotency"):
            assert database.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
    with start() as server, Client(server.url) as client, server.http() as http:
        assert http.get("/v1/jobs").json()["items"] == []
        assert [item["id"] for item in http.get("/v1/arrays").json()["items"]] == [operand.id]
        assert len(list((tmp_path / "data" / "extents").iterdir())) == 1
        repeated = http.post("/v1/jobs", json=job, headers={**headers, "Prefer": "wait=60"})
        assert (repeated.status_code, "idempotent-replayed" in repeated.headers) == (200, False)
        np.testing.assert_array_equal(client.job(repeated.json()["id"]).result().numpy(), a @ a)
