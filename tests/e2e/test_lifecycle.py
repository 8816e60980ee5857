"""Restart, loss of a worker, loss of the supervisor, draining: the promises of a job that was answered 202."""

from __future__ import annotations

import contextlib
import signal
import sqlite3

import numpy as np
import psutil
import pytest
from gates import Gate
from live_server import LiveServer, until
from local_server import LocalServer

import gemmserve
from gemmserve import Client

pytestmark = pytest.mark.flaky(reruns=0)  # a job that is lost once is lost

N = 768  # complex128: a few panels, between which a worker can be held


@pytest.fixture
def gate(tmp_path) -> Gate:
    return Gate(tmp_path / "gate")


@pytest.fixture
def start(tmp_path, gate):
    """A server on the same folder as the one before, whose worker stands still where the gate is shut."""
    return lambda **environment: LiveServer(data_dir=tmp_path / "data", environment=gate.environment | environment)


@pytest.fixture
def operand() -> np.ndarray:
    return np.full((N, N), 1 + 1j)


def check(result: np.ndarray) -> None:
    assert result.shape == (N, N)
    assert np.all(result == 2j * N)  # every term (1 + i)^2 = 2i, exact


def submit_and_hold(client, gate, operand):
    """A job that a worker is in the middle of, and stays there."""
    gate.shut(after=2)
    remote = client.put(operand)
    job = client.submit("gemm", remote, remote)
    gate.wait_reached()
    assert client.job(job.id).state == "running"
    return job


def recorded_state(data_dir, job):
    """What a server that starts on the folder would find."""
    with contextlib.closing(sqlite3.connect(data_dir / "gemmserve.sqlite")) as database:
        return database.execute("SELECT state FROM jobs WHERE id = ?", (job.id,)).fetchone()[0]


def test_a_restart_keeps_arrays_and_finished_jobs(tmp_path, random_complex) -> None:
    a = random_complex(50, 50)
    with LiveServer(data_dir=tmp_path) as server, Client(server.url) as client:
        kept, gone = client.put(a), client.put(a)
        gone.delete()
        job = client.submit("gemm", kept, kept)
        job.wait(60)
        result_id = job.result().id
    with LiveServer(data_dir=tmp_path) as server, Client(server.url) as client:
        np.testing.assert_array_equal(client.array(kept.id).numpy(), a)
        again = client.job(job.id)
        assert again.state == "succeeded"
        assert again.result().id == result_id
        np.testing.assert_allclose(again.result().numpy(), a @ a, rtol=1e-4, atol=1e-4)
        with pytest.raises(gemmserve.NotFound):
            client.array(gone.id).numpy()


def test_a_job_survives_kill_9_of_its_worker(start, gate, operand) -> None:
    with start() as server, Client(server.url) as client:
        job = submit_and_hold(client, gate, operand)
        (worker,) = server.workers()
        worker.kill()
        gate.open()
        job.wait(120)
        assert job.state == "succeeded"
        assert client.job(job.id).info.attempt == 2
        check(job.result().numpy())
        server.wait_ready()


def test_a_job_survives_kill_9_of_everything(tmp_path, start, gate, operand) -> None:
    with start() as server, Client(server.url) as client:
        job = submit_and_hold(client, gate, operand)
        until(lambda: recorded_state(tmp_path / "data", job) == "running")  # it goes on record behind the job's start
        # Nothing may be left behind, and the next start need not wait for anything.
        server.terminate(signal.SIGKILL)
    gate.open()
    with start() as server, Client(server.url) as client:
        again = client.job(job.id)
        again.wait(120)
        assert again.state == "succeeded"
        assert again.info.attempt == 2
        check(again.result().numpy())


def test_kill_9_of_the_front_is_repaired(tmp_path) -> None:
    with LiveServer(data_dir=tmp_path) as server, Client(server.url) as client:
        remote = client.put(np.eye(4))
        front = server.front()
        front.kill()
        psutil.wait_procs([front], timeout=60)
        server.wait_ready()
        np.testing.assert_array_equal((remote @ remote).numpy(), np.eye(4))


def test_sigterm_lets_a_running_job_finish(start, gate, operand) -> None:
    with start(GEMMSERVE_DRAIN_S="100") as server:
        with Client(server.url) as client:
            job = submit_and_hold(client, gate, operand)
        server.process.terminate()
        until(lambda: "draining: new work is refused" in server.text)
        assert server.process.poll() is None, "it waits for the job"
        gate.open()
        server.wait_end()
        assert server.returncode == 0, server.text
        assert "jobs were still running" not in server.text
    with start() as server, Client(server.url) as client:
        again = client.job(job.id)
        assert again.state == "succeeded", "it was finished before the server ended, not run again"
        assert again.info.attempt == 1
        check(again.result().numpy())


def test_one_data_dir_has_one_server(tmp_path) -> None:
    with LiveServer(data_dir=tmp_path), pytest.raises(RuntimeError) as caught, LocalServer(data_dir=tmp_path):
        pass
    assert str(tmp_path) in str(caught.value)


def test_a_taken_port_is_named(tmp_path, server) -> None:
    port = server.url.rsplit(":", 1)[1]
    with pytest.raises(RuntimeError, match=port), LocalServer("--port", port, data_dir=tmp_path):
        pass


def test_listening_beyond_loopback_needs_a_word(tmp_path) -> None:
    with (
        pytest.raises(RuntimeError, match="allow-unauthenticated"),
        LocalServer("--host", "0.0.0.0", data_dir=tmp_path),
    ):
        pass


def test_ready_line_means_ready(tmp_path) -> None:
    with LiveServer(data_dir=tmp_path) as server, server.http() as http:
        assert http.get("/readyz").status_code == 200
        assert server.text.count(server.url) == 1


def check_together(server, asked, ids):
    """Sent again with its key, the request asks for the same jobs, which end."""
    server.wait_ready()
    headers = {"Idempotency-Key": "together", "Prefer": "wait=60"}

    def ended():
        answer = http.post("/v1/jobs", json={"jobs": asked}, headers=headers)
        return answer.json()["jobs"] if answer.status_code == 200 else None

    with server.http() as http, Client(server.url) as client:
        jobs = until(ended)
        assert [job["id"] for job in jobs] == ids
        assert {job["state"] for job in jobs} == {"succeeded"}
        for job, request in zip(jobs, asked, strict=True):
            np.testing.assert_array_equal(client.get(job["result"]["d"]), request["alpha"] * np.eye(4))


@pytest.mark.parametrize("whom", ["worker", "front", "everything"])
def test_jobs_submitted_together_survive_kill_9(start, gate, operand, whom) -> None:
    with start() as server, Client(server.url) as client:
        submit_and_hold(client, gate, operand)  # the others wait behind it
        remote = client.put(np.eye(4))
        asked = [{"op": "gemm", "a": remote.id, "b": remote.id, "alpha": number} for number in range(1, 101)]
        with server.http() as http:
            told = http.post("/v1/jobs", json={"jobs": asked}, headers={"Idempotency-Key": "together"})
        assert told.status_code == 202
        ids = [job["id"] for job in told.json()["jobs"]]
        if whom == "worker":
            (worker,) = server.workers()
            worker.kill()
        elif whom == "front":
            front = server.front()
            front.kill()
            psutil.wait_procs([front], timeout=60)
        else:
            server.terminate(signal.SIGKILL)
        gate.open()
        if whom != "everything":
            check_together(server, asked, ids)
    if whom == "everything":
        with start() as server:
            check_together(server, asked, ids)
