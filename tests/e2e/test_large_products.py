"""Large products on the real server, block by block: the same bits however many workers, whoever is killed."""

from __future__ import annotations

import io
import re
import signal
from pathlib import Path

import httpx
import numpy as np
import pytest
from gates import Gate
from live_server import LiveServer, until
from python_path import python_path

import gemmserve
from gemmserve import Client

pytestmark = pytest.mark.flaky(reruns=0)  # bits that differ once differ

SUPPORT = Path(__file__).parents[1] / "support"
N, SIDE = 448, 64
BLOCKS = (N // SIDE) ** 2
MIDDLE = 20
"""Points between parts of the work that each worker passes: a few blocks of the many."""
EPS = np.finfo(np.float32).eps


@pytest.fixture
def gate(tmp_path) -> Gate:
    return Gate(tmp_path / "gate")


@pytest.fixture
def start(tmp_path, gate):
    """start(3): a server with so many workers, on the same folder as the one before."""

    def server(workers: int) -> LiveServer:
        devices = ",".join(f"cpu:{number}" for number in range(workers))
        settings = {"GEMMSERVE_DEVICE": devices, "GEMMSERVE_BLOCK_SIDE": str(SIDE)}
        return LiveServer(data_dir=tmp_path / "data", environment=gate.environment | settings)

    return server


@pytest.fixture
def operands(random_complex) -> tuple[np.ndarray, np.ndarray]:
    return random_complex(N, N), random_complex(N, N)


def submit_and_hold(client, gate, a, b):
    """A job that all workers are in the middle of, and stay there; some blocks are done."""
    gate.shut(after=MIDDLE)
    job = client.submit("gemm", a, b)
    gate.wait_reached()
    until(lambda: job.refresh().progress)
    return job


def test_the_bits_are_the_same_for_one_two_and_three_workers_and_after_a_loss(start, gate, operands) -> None:
    a, b = operands
    exact = a.astype(complex) @ b.astype(complex)
    bound = 2 * (N + 4) * EPS * (np.abs(a).astype(float) @ np.abs(b).astype(float))
    bits, reduced = {}, {}
    for workers in (1, 2, 3):
        with start(workers) as server, Client(server.url) as client:
            ra, rb = client.put(a), client.put(b)
            job = client.submit("gemm", ra, rb).wait(120)
            assert (job.state, job.progress, job.info.attempt) == ("succeeded", 1, 1), job.info.error
            result = job.result().numpy()
            assert np.all(np.abs(result - exact) <= bound)
            bits[workers] = result.tobytes()
            reduced[workers] = bits_of_reduction(client, ra, rb)
            if workers < 3:
                continue
            job = submit_and_hold(client, gate, ra, rb)
            assert 0 < job.progress < 1
            assert len(client.arrays()) == 2 * 3 + 3, "what is not whole is nobody's"
            server.workers()[1].kill()
            gate.open()
            job.wait(120)
            assert (job.state, job.info.attempt) == ("succeeded", 1), "the blocks of one worker ran again, not the job"
            bits["a worker killed"] = job.result().numpy().tobytes()
            server.wait_ready()
    assert len(set(bits.values())) == 1, [name for name in bits if bits[name] != bits[1]]
    assert len(set(reduced.values())) == 1
    largest, places = (np.frombuffer(each, dtype) for each, dtype in zip(reduced[1], ("f4", "i8"), strict=True))
    magnitudes = np.abs(exact)
    assert np.all(np.abs(largest - magnitudes.max(0)) <= 2 * bound.max(0))
    assert np.all(magnitudes.max(0) - magnitudes[places, range(N)] <= 4 * bound.max(0))


def bits_of_reduction(client, ra, rb) -> tuple[bytes, bytes]:
    """Answer of a job by blocks, whose results are gone afterwards."""
    job = client.submit("gemm_reduce", ra, rb, reduce=["absmax", "argmax"], axis="m").wait(120)
    assert (job.state, job.progress) == ("succeeded", 1), job.info.error
    found = job.result()
    bits = tuple(found[name].numpy().tobytes() for name in ("absmax", "argmax"))
    for each in found.values():
        each.delete()
    return bits


def test_kill_9_in_the_middle(start, gate, operands) -> None:
    """What was not durable is computed again, and has the same bits."""
    with start(2) as server, Client(server.url) as client:
        ra, rb = client.put(operands[0]), client.put(operands[1])
        expected = client.gemm(ra, rb).numpy().tobytes()
        job = submit_and_hold(client, gate, ra, rb)
        server.front().kill()
        gate.open()
        server.wait_ready()
        assert client.job(job.id).wait(120).result().numpy().tobytes() == expected
        job = submit_and_hold(client, gate, ra, rb)
        server.terminate(signal.SIGKILL)
    gate.open()
    with start(3) as server, Client(server.url) as client:
        again = client.job(job.id).wait(120)
        assert (again.state, again.progress) == ("succeeded", 1)
        assert again.result().numpy().tobytes() == expected


def test_cancelled_watched_and_of_a_request_of_its_own(start, gate, operands) -> None:
    a, b = operands
    with start(2) as server, Client(server.url) as client:
        ra, rb = client.put(a), client.put(b)
        job = submit_and_hold(client, gate, ra, rb)
        job.cancel()
        assert (job.state, job.progress) == ("cancelled", None)
        with pytest.raises(gemmserve.JobCancelled):
            job.result()
        server.wait_quiet()  # though the gate is shut: a worker stops within a block
        assert len(client.arrays()) == 2
        gate.open()
        job = client.submit("gemm", ra, rb, verify=True)
        shares = [info.progress for info in job.events()]
        assert shares == sorted(shares)
        assert shares[-1] == 1
        assert job.info.residual < 1e-5
        body = {name: (f"{name}.npy", npy(array)) for name, array in (("a", a), ("b", b))}
        answer = httpx.post(f"{server.url}/v1/gemm", files=body, timeout=120, trust_env=False)
        assert answer.status_code == 200, answer.text
        assert answer.content.endswith(job.result().numpy().tobytes())


def test_on_two_devices_with_results_of_others_as_operands(tmp_path, operands) -> None:
    """Stand-ins of devices, whose workers load panels of a block while they compute another, and keep results: what one
    of them has alone reaches both as an operand. Panels of one go to the other.
    """
    a, b = operands
    stand_ins = {
        "PYTHONPATH": python_path(SUPPORT / "device_on_host", SUPPORT / "cupy_on_numpy"),
        "CUPY_ON_NUMPY_DEVICES": "2",
        "CUPY_ON_NUMPY_SHARED": str(tmp_path / "memory"),
        "GEMMSERVE_PEER_COPIES": "always",
        "GEMMSERVE_LOG_LEVEL": "debug",
        "GEMMSERVE_DEVICE": "cuda:0,cuda:1",
        "GEMMSERVE_BLOCK_SIDE": str(SIDE),
        "GEMMSERVE_WRITE_BACK_DELAY_S": "60",
    }
    (tmp_path / "memory").mkdir()
    with LiveServer(data_dir=tmp_path / "data", environment=stand_ins) as server, Client(server.url) as client:
        until(lambda: [each["state"] for each in client.devices()] == ["ready"] * 2)
        ra, rb = client.put(a), client.put(b)
        small = client.put(a[:, :1])
        column = client.put(b[:1])
        outer = small @ column  # stays on a device
        job = client.submit("gemm", ra, rb).wait(120)
        assert (job.state, job.progress) == ("succeeded", 1), job.info.error
        exact = a.astype(complex) @ b.astype(complex)
        bound = 2 * (N + 4) * EPS * (np.abs(a).astype(float) @ np.abs(b).astype(float))
        assert np.all(np.abs(job.result().numpy() - exact) <= bound)
        chained = client.submit("gemm", outer, job.result()).wait(120)
        assert chained.state == "succeeded", chained.info.error
        first = outer.numpy().astype(complex)
        second = job.result().numpy().astype(complex)
        bound = 2 * (N + 4) * EPS * (np.abs(first) @ np.abs(second))
        assert np.all(np.abs(chained.result().numpy() - first @ second) <= bound)
        for _ in range(5):
            if shared := server.joined is not None or re.search(r"panel \w+: across from", server.text):
                break
            client.submit("gemm", ra, rb).wait(120)
        assert shared
        server.workers()[0].kill()
        again = client.submit("gemm", ra, rb).wait(120)
        assert again.result().numpy().tobytes() == job.result().numpy().tobytes()


def npy(array: np.ndarray) -> bytes:
    body = io.BytesIO()
    np.save(body, array)
    return body.getvalue()
