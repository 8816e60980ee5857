"""Programs on the real server: kill -9 in the middle, cancellation, restarts; the same bits every time."""

from __future__ import annotations

import signal
import time

import httpx
import numpy as np
import pytest
from live_server import LiveServer

from gemmserve import Client, JobCancelled

N, STEPS = 640, 12  # a step takes some tens of milliseconds on one core: time enough to be interrupted


def wait_for(condition, within_s: float = 60.0):
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.005)
    return value


@pytest.fixture
def unitary(rng) -> np.ndarray:
    return np.linalg.qr(rng.standard_normal((N, N)) + 1j * rng.standard_normal((N, N)))[0]


def submit(client, operand, steps=STEPS, **fields):
    """x <- operand^T x, again and again; the first and the last value are kept."""
    chain = [{"id": "x0", "op": "gemm", "a": operand.id, "b": operand.id}]
    chain += [
        {"id": f"x{n}", "op": "gemm", "a": operand.id, "b": f"$x{n - 1}", "trans_a": "T"} for n in range(1, steps)
    ]
    chain.append({"id": "y", "op": "gemm_reduce", "a": f"$x{steps - 1}", "b": operand.id, "reduce": ["sum", "argmax"]})
    job = {"op": "program", "steps": chain, "keep": ["x0", f"x{steps - 1}", "y"], **fields}
    answer = httpx.post(f"{client.url}/v1/jobs", json=job, timeout=60, trust_env=False)
    assert answer.status_code == 202, answer.text
    return client.job(answer.json()["id"])


def bits(job) -> dict[str, bytes]:
    assert job.state == "succeeded", job.info.error
    return {name: array.numpy().tobytes() for name, array in job.result().items()}


def test_kill_9_of_the_worker_and_of_everything_in_the_middle(tmp_path, unitary) -> None:
    with LiveServer(data_dir=tmp_path) as server, Client(server.url) as client:
        operand = client.put(unitary)
        undisturbed = submit(client, operand).wait(120)
        expected = bits(undisturbed)
        job = submit(client, operand)
        wait_for(lambda: client.job(job.id).state == "running")
        (worker,) = server.workers()
        worker.kill()
        assert bits(job.wait(120)) == expected
        assert job.info.attempt == 2
        assert [step["id"] for step in job.info.steps] == [*(f"x{n}" for n in range(STEPS)), "y"]
        server.wait_ready()
        again = submit(client, operand)
        wait_for(lambda: client.job(again.id).state == "running")
        operand.delete()
        server.terminate(signal.SIGKILL)
    with LiveServer(data_dir=tmp_path) as server, Client(server.url) as client:
        found = client.job(again.id).wait(120)
        assert bits(found) == expected
        # Alone, product after product: the same bits.
        operand = client.put(unitary)
        value = client.gemm(operand, operand)
        for _ in range(STEPS - 1):
            value = client.gemm(operand, value, trans_a="T")
        assert value.numpy().tobytes() == expected[f"x{STEPS - 1}"]
        assert len(client.arrays()) == 1 + STEPS + 3 * 4, "no intermediate is stored"


def test_a_running_program_is_cancelled(server, client, unitary) -> None:
    operand = client.put(unitary)
    job = submit(client, operand, steps=900)
    wait_for(lambda: client.job(job.id).state == "running")
    job.cancel()
    with pytest.raises(JobCancelled):
        job.result()
    small = client.put(np.eye(4))  # the worker is free again, long before the program would have ended
    np.testing.assert_array_equal((small @ small).numpy(), np.eye(4))
    late = submit(client, operand, steps=900, timeout_s=0.3)
    assert late.wait(60).state == "expired"
