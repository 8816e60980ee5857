"""Supervisor, front and worker as real processes: what each death costs, and that it costs no more.

A stopped worker (SIGSTOP) holds a job in the state running for as long as a test needs, without computing anything.
"""

from __future__ import annotations

import contextlib
import io
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from live_server import LiveServer

N = 48


@contextlib.contextmanager
def server_on(data_dir, **environment):
    with LiveServer(data_dir=data_dir, environment=environment) as server, server.http() as http:
        yield server, http


def upload(http, array):
    answer = http.post(
        "/v1/arrays",
        params={"dtype": array.dtype.name, "shape": ",".join(map(str, array.shape))},
        headers={"Content-Type": "application/octet-stream"},
        content=array.tobytes(),
    )
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


def submit(http, a, **fields):
    answer = http.post("/v1/jobs", json={"op": "gemm", "a": a, "b": a, **fields})
    assert answer.status_code == 202, answer.text
    return answer.json()["id"]


def job(http, job_id, wait=0):
    return http.get(f"/v1/jobs/{job_id}", params={"wait": wait}).json()


def until(condition, within_s=30.0):
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.02)
    return value


def check(http, finished, expected):
    assert finished["state"] == "succeeded", finished
    raw = http.get(f"/v1/arrays/{finished['result']['d']}/data", headers={"Accept": "application/octet-stream"})
    np.testing.assert_allclose(np.frombuffer(raw.content, expected.dtype).reshape(expected.shape), expected, rtol=1e-12)


def of_kind(server, module):
    return [process for process in server.processes() if module in process.cmdline()]


def held_job(server, http, a):
    """A job that a stopped worker has."""
    (worker,) = server.workers()
    worker.suspend()
    job_id = submit(http, a)
    until(lambda: job(http, job_id)["state"] == "running")
    return job_id, worker


@pytest.fixture
def a():
    return np.random.default_rng(5).standard_normal((N, N))


def test_kill_9_of_the_supervisor_leaves_no_process_and_the_next_start_finishes_its_jobs(tmp_path, a):
    with LiveServer(data_dir=tmp_path) as server, server.http() as http:
        job_id, worker = held_job(server, http, upload(http, a))
        queued_id = submit(http, upload(http, 2 * a))
        worker.resume()  # a stopped process could not even exit
        server.terminate(signal.SIGKILL)  # asserts that nothing is left
    with server_on(tmp_path) as (_, http):
        check(http, job(http, job_id, wait=30), a @ a)
        check(http, job(http, queued_id, wait=30), 4 * (a @ a))


FATAL = """
import os, signal, sys
if "gemmserve_service.worker" in sys.orig_argv:
    from gemmserve_service.worker.device import CpuBackend
    run = CpuBackend.run
    def fatal(self, params, *rest):
        if params.alpha == 666:
            os.kill(os.getpid(), signal.SIGSEGV)
        return run(self, params, *rest)
    CpuBackend.run = fatal
"""


HANGS = """
import sys, time
if "gemmserve_service.worker" in sys.orig_argv:
    from gemmserve_service.worker.device import CpuBackend
    run = CpuBackend.run
    def hang(self, params, *rest):
        while params.alpha == 666:
            time.sleep(0.05)  # the heart goes on beating
        return run(self, params, *rest)
    CpuBackend.run = hang
"""


def test_a_job_that_hangs_costs_its_worker_then_fails_and_takes_no_other_along(tmp_path, a):
    (tmp_path / "fault").mkdir()
    (tmp_path / "fault" / "sitecustomize.py").write_text(HANGS)
    environment = {
        "PYTHONPATH": str(tmp_path / "fault"),
        "GEMMSERVE_HANG_S": "0.5",
        "GEMMSERVE_HANG_FACTOR": "0",
        "GEMMSERVE_MAX_ATTEMPTS": "2",
    }
    with server_on(tmp_path / "data", **environment) as (server, http):
        operand = upload(http, a)
        hangs, behind = submit(http, operand, alpha=666), submit(http, operand)
        failed = job(http, hangs, wait=30)
        assert (failed["state"], failed["attempt"]) == ("failed", 2)
        assert failed["error"]["type"] == "/problems/worker-crashed"
        check(http, job(http, behind, wait=30), a @ a)
        assert "has not got on for" in server.text


def test_processes_that_stand_still_are_replaced_and_readyz_says_so_meanwhile(tmp_path, a):
    with server_on(tmp_path, GEMMSERVE_HEARTBEAT_TIMEOUT_S="6") as (server, http):  # of a healthy one on a busy machine
        operand = upload(http, a)
        (worker,) = server.workers()
        worker.suspend()  # idle: no job would have told
        unready = until(lambda: answer if (answer := http.get("/readyz")).status_code == 503 else None)
        assert unready.json()["type"] == "/problems/not-ready"
        server.wait_ready()
        assert server.workers()[0].pid != worker.pid
        (front,) = of_kind(server, "gemmserve_service.front")
        front.suspend()
        with httpx.Client(base_url=server.url, timeout=30) as fresh:  # waits in the backlog
            check(fresh, job(fresh, submit(fresh, operand), wait=30), a @ a)
        assert of_kind(server, "gemmserve_service.front")[0].pid != front.pid
        assert "the front gave no sign of life" in server.text


def test_a_cancelled_job_frees_its_worker_long_before_its_end(tmp_path):
    """Of about 1.1 Tflop, a minute of this machine, the worker does no more than a panel or two."""
    with server_on(tmp_path) as (server, http):
        large, small = upload(http, np.ones((4096, 4096))), upload(http, np.eye(8))
        began = time.monotonic()
        assert job(http, submit(http, small), wait=30)["state"] == "succeeded"
        large_id = submit(http, large, compute="fp64", alpha=8)
        second_id = submit(http, large, compute="fp64", alpha=9)
        until(lambda: job(http, large_id)["state"] == "running")
        for cancelled in (large_id, second_id):
            assert http.delete(f"/v1/jobs/{cancelled}").json()["state"] == "cancelled"
        check(http, job(http, submit(http, small), wait=30), np.eye(8))
        assert time.monotonic() - began < 30
        until(lambda: "stopped after" in server.text)


def test_a_small_job_does_not_wait_for_a_large_one(tmp_path):
    """Of 137 Gflop: it goes on meanwhile."""
    with server_on(tmp_path) as (_, http):
        large, small = upload(http, np.ones((4096, 4096), "f4")), upload(http, np.eye(8))
        large_id = submit(http, large)
        until(lambda: job(http, large_id)["state"] == "running")
        for _ in range(3):
            check(http, job(http, submit(http, small), wait=30), np.eye(8))
        if job(http, large_id)["state"] == "succeeded":
            pytest.skip("this machine computes 137 Gflop before it answers four requests")
        done = job(http, large_id, wait=60)
        assert (done["state"], done["attempt"]) == ("succeeded", 1)


@pytest.fixture
def fatal(tmp_path):
    """An environment in which a product with alpha = 666 kills its worker."""
    folder = tmp_path / "fault"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(FATAL)
    return {"PYTHONPATH": str(folder)}


def test_a_job_that_kills_every_worker_fails_and_takes_no_other_along(tmp_path, a, fatal):
    with server_on(tmp_path / "data", **fatal) as (server, http):
        operand = upload(http, a)
        pid = server.workers()[0].pid
        poisoned = submit(http, operand, alpha=666)
        behind = submit(http, operand)
        failed = job(http, poisoned, wait=30)
        assert (failed["state"], failed["attempt"]) == ("failed", 3)
        assert failed["error"]["type"] == "/problems/worker-crashed"
        check(http, job(http, behind, wait=30), a @ a)
        server.wait_ready()
        assert server.workers()[0].pid != pid
        device = http.get("/v1/devices").json()["devices"][0]
        assert device["restarts"] == 3


def test_a_one_shot_request_survives_its_worker(tmp_path, a):
    def npy(array):
        buffer = io.BytesIO()
        np.save(buffer, array)
        return buffer.getvalue()

    with server_on(tmp_path) as (server, http):
        (worker,) = server.workers()
        worker.suspend()
        answers = []
        request = threading.Thread(
            target=lambda: answers.append(http.post("/v1/gemm", files={"a": npy(a), "b": npy(a)}))
        )
        request.start()
        with server.http() as other:
            until(lambda: other.get("/v1/devices").json()["devices"][0]["jobs_running"] == 1)
        worker.kill()
        request.join(30)
        assert answers[0].status_code == 200, answers[0].text
        np.testing.assert_allclose(np.load(io.BytesIO(answers[0].content)), a @ a)


def test_a_worker_outlives_the_front_and_the_front_s_jobs_run_again(tmp_path, a):
    with server_on(tmp_path) as (server, http):
        job_id, worker = held_job(server, http, upload(http, a))
        waiting = submit(http, upload(http, a + 1))
        (front,) = of_kind(server, "gemmserve_service.front")
        front.kill()
        worker.resume()
        # The supervisor keeps the socket open: this connection waits for the next front.
        with httpx.Client(base_url=server.url, timeout=30) as fresh:
            assert fresh.get("/livez").status_code == 200
            check(fresh, job(fresh, job_id, wait=30), a @ a)
            check(fresh, job(fresh, waiting, wait=30), (a + 1) @ (a + 1))
            assert job(fresh, job_id)["attempt"] == 2
        assert [process.pid for process in server.workers()] == [worker.pid]


def test_sigterm_leaves_what_waits_to_the_next_start(tmp_path, a):
    with LiveServer(data_dir=tmp_path, environment={"GEMMSERVE_DRAIN_S": "30"}) as server, server.http() as http:
        operand = upload(http, a)
        job_id, worker = held_job(server, http, operand)
        waiting = submit(http, operand)
        server.process.send_signal(signal.SIGTERM)

        def draining():
            refused = http.post("/v1/jobs", json={"op": "gemm", "a": operand, "b": operand})
            return refused if refused.status_code == 503 else None

        refused = until(draining)
        assert refused.json()["type"] == "/problems/draining"
        assert int(refused.headers["Retry-After"]) > 0
        assert http.get("/readyz").status_code == 503
        worker.resume()
        assert server.process.wait(30) == 0
        server.terminate()
    with server_on(tmp_path) as (_, http):
        finished = job(http, job_id)
        assert finished["attempt"] == 1
        check(http, finished, a @ a)
        check(http, job(http, waiting, wait=30), a @ a)


def test_a_drain_is_bounded(tmp_path, a):
    with LiveServer(data_dir=tmp_path, environment={"GEMMSERVE_DRAIN_S": "0.5"}) as server, server.http() as http:
        job_id, _ = held_job(server, http, upload(http, a))
        began = time.monotonic()
        server.terminate()
        assert server.returncode == 0
        assert time.monotonic() - began < 30
    with server_on(tmp_path) as (_, http):
        check(http, job(http, job_id, wait=30), a @ a)


def test_a_long_data_path_and_a_private_control_socket(tmp_path):
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    base = Path(tempfile.mkdtemp(prefix="gs-"))  # tmp_path itself may be too long for a socket
    with server_on(deep, GEMMSERVE_RUNTIME_DIR=str(base)) as (_, http):
        assert http.get("/readyz").status_code == 200
        (folder,) = base.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((deep / "extents").stat().st_mode) == 0o700
    base.rmdir()  # nothing is left in it


def serve(tmp_path, *arguments):
    command = [sys.executable, "-m", "gemmserve.cli", "serve", "--port", "0", "--data-dir", str(tmp_path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_device_that_is_not_there_ends_the_start(tmp_path):
    ended = serve(tmp_path, "--device", "cuda:63")
    assert ended.returncode == 1
    assert "cuda:63" in ended.stderr
    assert "gemmserve doctor" in ended.stderr


def test_a_database_that_is_none_ends_the_start(tmp_path):
    (tmp_path / "gemmserve.sqlite").write_bytes(b"not the pages of a database" * 400)
    ended = serve(tmp_path, "--device", "cpu")
    assert ended.returncode == 1
    assert "gemmserve.sqlite" in ended.stderr


def test_the_listening_port_is_the_supervisor_s(tmp_path):
    with server_on(tmp_path) as (server, http):
        port = urlsplit(server.url).port
        (front,) = of_kind(server, "gemmserve_service.front")
        front.suspend()
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:  # the backlog takes it
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            front.kill()
            connection.settimeout(30)
            assert b"200 OK" in b"".join(iter(lambda: connection.recv(4096), b""))
        server.wait_ready()
        assert http.get("/livez").status_code == 200
