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


HELD_DEVICE = """
from pathlib import Path

device, held = {{"__name__": "device"}}, {{"__name__": "held"}}
for name, names in (("device_on_host", device), ("held_work", held)):
    path = Path({support!r}) / name / "sitecustomize.py"
    exec(compile(path.read_text(), str(path), "exec"), names)
gate, compute = held["HeldGate"](held["_FILE"]), device["call"]


def call(*given, **fields):
    gate.stand(lambda: None)
    compute(*given, **fields)


device["_REPLACED"]["gemmserve_service.executor.worker.cuda.backend"] = call
"""
"""Stand-in of a device whose kernels the gate holds: its stages pass other points than a processor's products."""


@pytest.fixture
def start_devices(tmp_path, gate):
    """start_devices("power"): a server with two stand-ins of devices, whose workers the gate holds; what is in the host
    arena stays there.
    """
    both = tmp_path / "both"
    both.mkdir()
    (tmp_path / "memory").mkdir()
    (both / "sitecustomize.py").write_text(HELD_DEVICE.format(support=str(SUPPORT)))
    settings = {
        "PYTHONPATH": python_path(both, SUPPORT / "cupy_on_numpy", SUPPORT / "held_work"),
        "CUPY_ON_NUMPY_DEVICES": "2",
        "CUPY_ON_NUMPY_SHARED": str(tmp_path / "memory"),
        "GEMMSERVE_DEVICE": "cuda:0,cuda:1",
        "GEMMSERVE_BLOCK_SIDE": str(SIDE),
        "GEMMSERVE_HOST_ARENA_BYTES": str(128 << 20),
        "GEMMSERVE_ARENA_AHEAD_BYTES": str(16 << 20),
        "GEMMSERVE_WRITE_BACK_DELAY_S": "60",
    }

    def server(durability: str = "process") -> LiveServer:
        environment = gate.environment | settings | {"GEMMSERVE_DURABILITY": durability}
        return LiveServer(data_dir=tmp_path / "data", environment=environment)

    return server


def metric(server, name: str) -> float:
    with server.http() as http:
        found = re.search(rf"^gemmserve_{name}(?:{{.*}})? (\S+)$", http.get("/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def ready(server, client) -> None:
    server.wait_ready()
    until(lambda: [each["state"] for each in client.devices()] == ["ready"] * 2)


def files(tmp_path) -> int:
    return len(list((tmp_path / "data" / "extents").iterdir()))


@pytest.mark.parametrize("durability", ["process", "power"])
def test_results_in_the_host_arena_are_computed_again_after_kill_9(tmp_path, start_devices, operands, durability):
    a, b = operands
    nbytes = 8 * N * N
    with start_devices(durability) as server, Client(server.url) as client:
        ready(server, client)
        if server.joined is not None:
            pytest.skip("only this host's workers write there")
        ra, rb = client.put(a), client.put(b)
        before = files(tmp_path)
        job = client.submit("gemm", ra, rb).wait(120)
        assert (job.state, job.progress) == ("succeeded", 1), job.info.error
        assert metric(server, "host_arena_used_bytes") == nbytes
        assert files(tmp_path) == before
        bits = job.result().numpy().tobytes()
        exact = a.astype(complex) @ b.astype(complex)
        bound = 2 * (N + 4) * EPS * (np.abs(a).astype(float) @ np.abs(b).astype(float))
        assert np.all(np.abs(np.frombuffer(bits, "c8").reshape(N, N) - exact) <= bound)
        for worker in server.workers():
            worker.kill()  # which takes nothing along
        ready(server, client)
        assert job.result().numpy().tobytes() == bits
        assert metric(server, "results_recomputed_total") == 0
        server.front().kill()
        ready(server, client)
        assert job.result().numpy().tobytes() == bits
        assert metric(server, "results_recomputed_total") == 1
        second = client.submit("gemm", rb, ra).wait(120)
        expected = second.result().numpy().tobytes()
        assert metric(server, "host_arena_used_bytes") == nbytes, "what was computed again is in a file"
        server.terminate(signal.SIGKILL)
    with start_devices(durability) as server, Client(server.url) as client:
        ready(server, client)
        found = client.job(second.id).result()
        assert found.numpy().tobytes() == expected
        assert client.job(job.id).result().numpy().tobytes() == bits
        assert metric(server, "results_recomputed_total") == 1
        third = client.submit("gemm", ra, ra).wait(120)
        assert metric(server, "host_arena_used_bytes") == nbytes
        expected = third.result().numpy().tobytes()
    with start_devices(durability) as server, Client(server.url) as client:  # after SIGTERM all is in files
        ready(server, client)
        assert client.job(third.id).result().numpy().tobytes() == expected
        assert metric(server, "results_recomputed_total") == 0


def test_places_in_the_host_arena_outlive_losses_and_are_given_back(tmp_path, start_devices, gate, operands):
    with start_devices() as server, Client(server.url) as client:
        ready(server, client)
        if server.joined is not None:
            pytest.skip("only this host's workers write there")
        ra, rb = client.put(operands[0]), client.put(operands[1])
        before = files(tmp_path)
        first = client.submit("gemm", ra, rb).wait(120)
        bits = first.result().numpy().tobytes()
        first.result().delete()
        until(lambda: metric(server, "host_arena_used_bytes") == 0)
        job = submit_and_hold(client, gate, ra, rb)
        assert metric(server, "host_arena_used_bytes") == 8 * N * N, "all of it is reserved"
        server.workers()[1].kill()
        gate.open()
        job.wait(120)
        assert (job.state, job.info.attempt) == ("succeeded", 1)
        assert job.result().numpy().tobytes() == bits
        job.result().delete()
        ready(server, client)
        until(lambda: metric(server, "host_arena_used_bytes") == 0)
        job = submit_and_hold(client, gate, ra, rb)
        job.cancel()
        assert metric(server, "host_arena_used_bytes") == 8 * N * N, "workers are at blocks of it"
        gate.open()
        until(lambda: metric(server, "host_arena_used_bytes") == 0)
        assert files(tmp_path) == before, "none of these ever went to the disk"
        job = submit_and_hold(client, gate, ra, rb)
        server.front().kill()
        gate.open()
        ready(server, client)
        again = client.job(job.id).wait(120).result()
        assert again.numpy().tobytes() == bits
        again.delete()
        until(lambda: metric(server, "host_arena_used_bytes") == 0)


def npy(array: np.ndarray) -> bytes:
    body = io.BytesIO()
    np.save(body, array)
    return body.getvalue()
