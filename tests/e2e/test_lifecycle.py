"""Restart, loss of a worker, loss of the supervisor, draining: the promises of a job that was answered 202."""

from __future__ import annotations

import signal
import time

import numpy as np
import psutil
import pytest
from live_server import LiveServer
from local_server import LocalServer

import gemmserve
from gemmserve import Client

# On one core about five seconds of complex128 product: long enough to be interrupted.
SLOW = 2048


def wait_for(condition, within_s: float = 40.0):
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.02)
    return value


def running(client, job_id: str) -> bool:
    return client.job(job_id).state == "running"


@pytest.fixture
def slow_operand() -> np.ndarray:
    return np.full((SLOW, SLOW), 1 + 1j)


def check_slow(result: np.ndarray) -> None:
    assert result.shape == (SLOW, SLOW)
    assert np.all(result == 2j * SLOW)  # every term (1 + i)^2 = 2i, exact


def test_a_restart_keeps_arrays_and_finished_jobs(tmp_path, random_complex) -> None:
    a = random_complex(50, 50)
    with LiveServer(data_dir=tmp_path) as server, Client(server.url) as client:
        kept, gone = client.put(a), client.put(a)
        gone.delete()
        job = client.submit("gemm", kept, kept)
        job.wait(30)
        result_id = job.result().id
    with LiveServer(data_dir=tmp_path) as server, Client(server.url) as client:
        np.testing.assert_array_equal(client.array(kept.id).numpy(), a)
        again = client.job(job.id)
        assert again.state == "succeeded"
        assert again.result().id == result_id
        np.testing.assert_allclose(again.result().numpy(), a @ a, rtol=1e-4, atol=1e-4)
        with pytest.raises(gemmserve.NotFound):
            client.array(gone.id).numpy()


def test_a_job_survives_kill_9_of_its_worker(tmp_path, slow_operand) -> None:
    with LiveServer(data_dir=tmp_path) as server, Client(server.url) as client:
        operand = client.put(slow_operand)
        job = client.submit("gemm", operand, operand)
        wait_for(lambda: running(client, job.id))
        (worker,) = server.workers()
        worker.kill()
        job.wait(120)
        assert job.state == "succeeded"
        assert client.job(job.id).info.attempt == 2
        check_slow(job.result().numpy())
        server.wait_ready()


def test_a_job_survives_kill_9_of_everything(tmp_path, slow_operand) -> None:
    with LiveServer(data_dir=tmp_path) as server, Client(server.url) as client:
        operand = client.put(slow_operand)
        job = client.submit("gemm", operand, operand)
        # Nothing may be left behind, and the next start need not wait for anything.
        server.terminate(signal.SIGKILL)
    with LiveServer(data_dir=tmp_path) as server, Client(server.url) as client:
        again = client.job(job.id)
        again.wait(120)
        assert again.state == "succeeded"
        check_slow(again.result().numpy())


def test_kill_9_of_the_front_is_repaired(tmp_path) -> None:
    with LiveServer(data_dir=tmp_path) as server, Client(server.url) as client:
        remote = client.put(np.eye(4))
        fronts = [process for process in server.processes() if "gemmserve_service.front" in process.cmdline()]
        assert len(fronts) == 1
        fronts[0].kill()
        psutil.wait_procs(fronts, timeout=10)
        server.wait_ready()
        np.testing.assert_array_equal((remote @ remote).numpy(), np.eye(4))


def test_sigterm_lets_a_running_job_finish(tmp_path, slow_operand) -> None:
    with LiveServer(data_dir=tmp_path, environment={"GEMMSERVE_DRAIN_S": "60"}) as server:
        server._stop_within_s = 70
        with Client(server.url) as client:
            operand = client.put(slow_operand)
            job = client.submit("gemm", operand, operand)
            wait_for(lambda: running(client, job.id))
        server.terminate()
        assert server.returncode == 0, server.text
    with LiveServer(data_dir=tmp_path) as server, Client(server.url) as client:
        again = client.job(job.id)
        assert again.state == "succeeded", "it was finished before the server ended, not run again"
        assert again.info.attempt == 1
        check_slow(again.result().numpy())


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
