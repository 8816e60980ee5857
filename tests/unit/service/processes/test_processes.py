"""Supervisor, front and worker as real processes: what each death costs, and that it costs no more.

A stopped worker (SIGSTOP) holds a job in the state running for as long as a test needs, without computing anything.
No time limit here is one that a busy machine could meet: whatever is waited for has happened, or is never going to.
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
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from live_server import LiveServer, until
from standing import stand_still

N = 48
LONG_S = 120.0
"""Longer than a start of Python and NumPy takes on any machine, however busy."""


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


def job(http, job_id):
    return http.get(f"/v1/jobs/{job_id}").json()


def ended(http, job_id):
    """The job once it is over."""

    def over():
        found = http.get(f"/v1/jobs/{job_id}", params={"wait": 10}).json()
        return found if found["state"] not in {"queued", "running"} else None

    return until(over, LONG_S)


def check(http, finished, expected):
    assert finished["state"] == "succeeded", finished
    raw = http.get(f"/v1/arrays/{finished['result']['d']}/data", headers={"Accept": "application/octet-stream"})
    np.testing.assert_allclose(np.frombuffer(raw.content, expected.dtype).reshape(expected.shape), expected, rtol=1e-12)


def held_job(server, http, a):
    """A job that a stopped worker has."""
    worker = stand_still(server.workers()[0].pid)
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
        check(http, ended(http, job_id), a @ a)
        check(http, ended(http, queued_id), 4 * (a @ a))


FAULTS = """
import os, signal, sys, time
if "gemmserve_service.executor.worker" in sys.orig_argv:
    from gemmserve_service.executor.worker.host.backend import CpuBackend
    run = CpuBackend.run
    def faulty(self, params, *rest):
        if params.alpha == 666:
            os.kill(os.getpid(), signal.SIGSEGV)
        while params.alpha == 667:
            time.sleep(0.05)  # the heart goes on beating
        return run(self, params, *rest)
    CpuBackend.run = faulty
    CpuBackend.repeated = lambda *_: None  # short ones would go past it
"""


def test_jobs_that_kill_or_hang_their_workers_fail_and_take_no_other_along(tmp_path, a):
    (tmp_path / "fault").mkdir()
    (tmp_path / "fault" / "sitecustomize.py").write_text(FAULTS)
    environment = {
        "PYTHONPATH": str(tmp_path / "fault"),
        "GEMMSERVE_HANG_S": "1.5",  # of a healthy worker, twice in a row and in the microseconds of its one product
        "GEMMSERVE_HANG_FACTOR": "0",
        "GEMMSERVE_MAX_ATTEMPTS": "2",
    }
    with server_on(tmp_path / "data", **environment) as (server, http):
        operand, pid = upload(http, a), server.workers()[0].pid
        kills, hangs = submit(http, operand, alpha=666), submit(http, operand, alpha=667)
        behind = submit(http, operand)
        for poisoned in (kills, hangs):
            failed = ended(http, poisoned)
            assert (failed["state"], failed["attempt"]) == ("failed", 2)
            assert failed["error"]["type"] == "/problems/worker-crashed"
        check(http, ended(http, behind), a @ a)
        server.wait_ready()
        assert server.workers()[0].pid != pid
        assert http.get("/v1/devices").json()["devices"][0]["restarts"] >= 4
        assert "SIGSEGV" in server.text
        assert "has not got on for" in server.text


LATE = """
import os, sys, time
if "gemmserve_service.executor.worker" in sys.orig_argv:
    while os.path.exists(os.environ["GEMMSERVE_TEST_LATE"]):
        time.sleep(0.02)
"""


@pytest.mark.slow
def test_processes_that_stand_still_are_replaced_and_readyz_says_so_meanwhile(tmp_path, a):
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "sitecustomize.py").write_text(LATE)
    gate = tmp_path / "gate"
    environment = {
        "PYTHONPATH": str(tmp_path / "late"),
        "GEMMSERVE_TEST_LATE": str(gate),
        "GEMMSERVE_HEARTBEAT_TIMEOUT_S": "7",  # a healthy process on a busy machine stands still for 5 and a pulse
    }
    with server_on(tmp_path / "data", **environment) as (server, http):
        operand = upload(http, a)
        gate.touch()  # no new worker is ready before that is seen
        worker = stand_still(server.workers()[0].pid)  # idle: no job would have told
        unready = until(lambda: answer if (answer := http.get("/readyz")).status_code == 503 else None, LONG_S)
        assert unready.json()["type"] == "/problems/not-ready"
        gate.unlink()
        server.wait_ready()
        assert server.workers()[0].pid != worker.pid
        front = stand_still(server.front().pid)
        with httpx.Client(base_url=server.url, timeout=LONG_S) as fresh:  # waits in the backlog
            check(fresh, ended(fresh, submit(fresh, operand)), a @ a)
        assert server.front().pid != front.pid
        assert "the front gave no sign of life" in server.text


def test_small_jobs_pass_a_long_one_and_its_worker_is_free_once_it_is_cancelled(tmp_path):
    """A program of some 70 Tflop for one thread: no machine is through with it before the test is."""
    n, steps = 2048, 1000
    with server_on(tmp_path) as (server, http):
        large, small = upload(http, np.zeros((n, n), np.complex128)), upload(http, np.eye(8))
        chain = [{"id": "x0", "op": "gemm", "a": large, "b": large}]
        chain += [{"id": f"x{i}", "op": "gemm", "a": large, "b": f"$x{i - 1}"} for i in range(1, steps)]
        long_id = http.post("/v1/jobs", json={"op": "program", "steps": chain}).json()["id"]
        until(lambda: job(http, long_id)["state"] == "running")
        for _ in range(3):
            check(http, ended(http, submit(http, small)), np.eye(8))
        behind_id = submit(http, large)
        assert [job(http, each)["state"] for each in (long_id, behind_id)] == ["running", "queued"]
        for cancelled in (behind_id, long_id):
            assert http.delete(f"/v1/jobs/{cancelled}").json()["state"] == "cancelled"
        until(lambda: "stopped after" in server.text)
        until(lambda: http.get("/v1/devices").json()["devices"][0]["jobs_running"] == 0)
        check(http, ended(http, submit(http, small)), np.eye(8))


def test_a_one_shot_request_survives_its_worker(tmp_path, a):
    def npy(array):
        buffer = io.BytesIO()
        np.save(buffer, array)
        return buffer.getvalue()

    with server_on(tmp_path) as (server, http):
        worker = stand_still(server.workers()[0].pid)
        answers = []
        request = threading.Thread(
            target=lambda: answers.append(http.post("/v1/gemm", files={"a": npy(a), "b": npy(a)}))
        )
        request.start()
        with server.http() as other:
            until(lambda: other.get("/v1/devices").json()["devices"][0]["jobs_running"] == 1)
        worker.kill()
        request.join(LONG_S)
        assert answers[0].status_code == 200, answers[0].text
        np.testing.assert_allclose(np.load(io.BytesIO(answers[0].content)), a @ a)


def test_a_worker_outlives_the_front_and_the_front_s_jobs_run_again(tmp_path, a):
    with server_on(tmp_path) as (server, http):
        job_id, worker = held_job(server, http, upload(http, a))
        waiting = submit(http, upload(http, a + 1))
        front = stand_still(server.front().pid)
        # The supervisor keeps the listening socket: this connection waits for the next front.
        with socket.create_connection(("127.0.0.1", urlsplit(server.url).port), timeout=LONG_S) as connection:
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            front.kill()
            worker.resume()
            assert b"200 OK" in b"".join(iter(lambda: connection.recv(4096), b""))
        with server.http() as fresh:
            check(fresh, ended(fresh, job_id), a @ a)
            check(fresh, ended(fresh, waiting), (a + 1) @ (a + 1))
            assert job(fresh, job_id)["attempt"] == 2
        assert [process.pid for process in server.workers()] == [worker.pid]


def test_sigterm_leaves_what_waits_to_the_next_start(tmp_path, a):
    with LiveServer(data_dir=tmp_path, environment={"GEMMSERVE_DRAIN_S": "3600"}) as server, server.http() as http:
        operand = upload(http, a)
        job_id, worker = held_job(server, http, operand)
        waiting = submit(http, operand)
        server.process.send_signal(signal.SIGTERM)

        def draining():
            refused = http.post("/v1/jobs", json={"op": "gemm", "a": operand, "b": operand})
            return refused if refused.status_code == 503 else None

        refused = until(draining, LONG_S)
        assert refused.json()["type"] == "/problems/draining"
        assert int(refused.headers["Retry-After"]) > 0
        assert http.get("/readyz").status_code == 503
        worker.resume()
        server.wait_end()
        assert server.returncode == 0
    with server_on(tmp_path) as (_, http):
        finished = job(http, job_id)
        assert finished["attempt"] == 1
        check(http, finished, a @ a)
        check(http, ended(http, waiting), a @ a)


def test_a_drain_is_bounded(tmp_path, a):
    with LiveServer(data_dir=tmp_path, environment={"GEMMSERVE_DRAIN_S": "0.5"}) as server, server.http() as http:
        job_id, _ = held_job(server, http, upload(http, a))
        server.terminate()  # does not return before the job does, where there is no bound: never
        assert server.returncode == 0
    with server_on(tmp_path) as (_, http):
        check(http, ended(http, job_id), a @ a)


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
    return subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)


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
