"""Programs on the real server: kill -9 in the middle, restarts; the same bits every time."""

from __future__ import annotations

import signal

import httpx
import numpy as np
import pytest
from gates import Gate
from live_server import LiveServer

from gemmserve import Client

N, STEPS = 640, 6  # of two panels each
MIDDLE = 10
"""Points between parts of the work: in the fourth step."""


@pytest.fixture
def unitary(rng) -> np.ndarray:
    return np.linalg.qr(rng.standard_normal((N, N)) + 1j * rng.standard_normal((N, N)))[0]


def submit(client, operand, steps=STEPS, **fields):
    """x <- operand^T x, again and again, transposed by flag or by view; the first and the last value are kept."""
    turned = {"id": operand.id, "shape": [N, N], "strides": [1, N]}
    chain = [{"id": "x0", "op": "gemm", "a": operand.id, "b": operand.id}]
    chain += [
        {"id": f"x{n}", "op": "gemm", "b": f"$x{n - 1}"}
        | ({"a": turned} if n % 2 else {"a": operand.id, "trans_a": "T"})
        for n in range(1, steps)
    ]
    chain.append({"id": "y", "op": "gemm_reduce", "a": f"$x{steps - 1}", "b": operand.id, "reduce": ["sum", "argmax"]})
    job = {"op": "program", "steps": chain, "keep": ["x0", f"x{steps - 1}", "y"], **fields}
    answer = httpx.post(f"{client.url}/v1/jobs", json=job, timeout=120, trust_env=False)
    assert answer.status_code == 202, answer.text
    return client.job(answer.json()["id"])


def bits(job) -> dict[str, bytes]:
    assert job.state == "succeeded", job.info.error
    return {name: array.numpy().tobytes() for name, array in job.result().items()}


def test_kill_9_of_the_worker_and_of_everything_in_the_middle(tmp_path, unitary) -> None:
    gate = Gate(tmp_path / "gate")
    with LiveServer(data_dir=tmp_path / "data", environment=gate.environment) as server, Client(server.url) as client:
        operand = client.put(unitary)
        undisturbed = submit(client, operand).wait(120)
        expected = bits(undisturbed)
        gate.shut(after=MIDDLE)
        job = submit(client, operand)
        gate.wait_reached()
        (worker,) = server.workers()
        worker.kill()
        gate.open()
        assert bits(job.wait(120)) == expected
        assert job.info.attempt == 2
        assert [step["id"] for step in job.info.steps] == [*(f"x{n}" for n in range(STEPS)), "y"]
        server.wait_ready()
        gate.shut(after=MIDDLE)
        again = submit(client, operand)
        gate.wait_reached()
        operand.delete()
        server.terminate(signal.SIGKILL)
    gate.open()
    with LiveServer(data_dir=tmp_path / "data") as server, Client(server.url) as client:
        found = client.job(again.id).wait(120)
        assert bits(found) == expected
        assert found.info.attempt == 2
        # Alone, product after product: the same bits.
        operand = client.put(unitary)
        value = client.gemm(operand, operand)
        for _ in range(STEPS - 1):
            value = client.gemm(operand, value, trans_a="T")
        assert value.numpy().tobytes() == expected[f"x{STEPS - 1}"]
        assert len(client.arrays()) == 1 + STEPS + 3 * 4, "no intermediate is stored"


def test_sums_and_products_of_elements_between_products(tmp_path, rng) -> None:
    x = rng.standard_normal((300, 200)) + 1j * rng.standard_normal((300, 200))
    with LiveServer(data_dir=tmp_path / "data") as server, Client(server.url) as client:
        operand = client.put(x)
        row = client.put(x[:1].real.copy())
        steps = [
            {"id": "p", "op": "gemm", "a": operand.id, "b": operand.id, "trans_a": "C"},
            {"id": "s", "op": "add", "a": "$p", "b": row.id, "alpha": [0, 1], "beta": -2, "gamma": 0.5, "order": "F"},
            {"id": "m", "op": "multiply", "a": "$s", "b": "$p"},
            {"id": "copy", "op": "add", "a": "$m", "dtype": "complex64"},
        ]
        job = {"op": "program", "steps": steps, "keep": ["s", "m", "copy"], "verify": True}
        answer = httpx.post(f"{client.url}/v1/jobs", json=job, timeout=120, trust_env=False)
        assert answer.status_code == 202, answer.text
        found = client.job(answer.json()["id"]).wait(120)
        made = {name: array.numpy() for name, array in found.result().items()}
        p = x.conj().T @ x
        s = 1j * p - 2 * x[:1].real + 0.5
        np.testing.assert_allclose(made["s"], s, rtol=1e-12)
        np.testing.assert_allclose(made["m"], s * p, rtol=1e-12)
        np.testing.assert_array_equal(made["copy"], made["m"].astype("c8"))
        assert [step["algorithm"] for step in found.info.steps] == ["numpy", "add", "multiply", "add"]
        assert all(step["residual"] < 1e-12 for step in found.info.steps[:3])
