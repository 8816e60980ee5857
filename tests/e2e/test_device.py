"""A whole server whose worker owns a device: the CUDA backend on the stand-in for CuPy (tests/support)."""

from __future__ import annotations

import io
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from live_server import LiveServer, until
from python_path import python_path

from gemmserve import Client

SUPPORT = Path(__file__).parents[1] / "support"
DEVICE = {
    "PYTHONPATH": python_path(SUPPORT / "device_on_host", SUPPORT / "cupy_on_numpy"),
    "GEMMSERVE_DEVICE": "cuda:0",
}
LARGE = 600
"""Rows of float64 that make an array larger than what goes past the ring of pinned memory."""


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    with LiveServer(data_dir=tmp_path_factory.mktemp("data"), environment=DEVICE) as live:
        yield live


@pytest.fixture
def on_device(device):
    with Client(device.url) as connected:
        yield connected


def matrix(rng, rows, columns, dtype="complex64"):
    return (rng.integers(-4, 5, (rows, columns)) + 1j * rng.integers(-4, 5, (rows, columns))).astype(dtype)


def test_what_it_says_of_itself(on_device):
    (found,) = on_device.devices()
    assert (found["id"], found["spec"]["arch"], found["state"]) == ("cuda:0", "sm_90a", "ready")


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(3, 4, 5), (LARGE, 500, LARGE)])
def test_products_with_operands_sent_along(on_device, rng, order, shape):
    m, k, n = shape
    a, b, c = matrix(rng, m, k), matrix(rng, k, n), matrix(rng, m, n)
    d = on_device.gemm(np.asfortranarray(a), b, c, beta=2, order=order)
    np.testing.assert_array_equal(d, a @ b + 2 * c)


def test_resident_operands_again_and_again(on_device, rng):
    a, b = matrix(rng, LARGE, LARGE), matrix(rng, LARGE, LARGE)
    ra, rb = on_device.put(a), on_device.put(b)
    for _ in range(4):  # from the second on with what is prepared of them
        np.testing.assert_array_equal((ra @ rb).numpy(), a @ b)
    np.testing.assert_array_equal((ra.H @ rb).numpy(), a.conj().T @ b)
    np.testing.assert_array_equal(on_device.gemm_reduce(ra, rb, reduce="absmax").numpy(), np.abs(a @ b).max(axis=0))


def test_tiny_products_again_and_again(on_device, rng):
    a, b, c = matrix(rng, 6, 7), matrix(rng, 7, 8), matrix(rng, 6, 8)
    ra, rb, rc = on_device.put(a), on_device.put(b), on_device.put(np.asfortranarray(c))
    for _ in range(4):  # from the second on the shorter way
        d = ra @ rb
        np.testing.assert_array_equal(d.numpy(), a @ b)
        np.testing.assert_array_equal((d @ rb.H).numpy(), a @ b @ b.conj().T)
        again = on_device.gemm(ra, rb, rc, beta=2, order="F")
        np.testing.assert_array_equal(again.numpy(), a @ b + 2 * c)
        np.testing.assert_array_equal(on_device.gemm(a, b), a @ b)
        reduced = on_device.gemm_reduce(ra, rb, reduce="absmax")
        np.testing.assert_array_equal(reduced.numpy(), np.abs(a @ b).max(axis=0))


def test_many_at_once_are_told_apart(on_device, rng):
    arrays = [matrix(rng, 20 + number, 30) for number in range(40)]
    b = on_device.put(matrix(rng, 30, 7))
    right = b.numpy()

    def product(array):
        return on_device.gemm(array, right)

    with ThreadPoolExecutor(8) as pool:
        for array, d in zip(arrays, pool.map(product, arrays), strict=True):
            np.testing.assert_array_equal(d, array @ right)
    jobs = [on_device.submit("gemm", on_device.put(array), b) for array in arrays]
    for array, job in zip(arrays, jobs, strict=True):
        np.testing.assert_array_equal(job.result().numpy(), array @ right)


@pytest.mark.parametrize("shape", [(8, 16, 32), (3, 4, 5)])
def test_batches(on_device, rng, shape):
    m, k, n = shape
    a = np.stack([matrix(rng, m, k) for _ in range(50)])
    b = np.stack([matrix(rng, k, n) for _ in range(50)])
    np.testing.assert_array_equal(np.stack(on_device.gemm_many(a, b)), a @ b)
    np.testing.assert_array_equal(np.stack(on_device.gemm_many(a, b[0])), a @ b[0])
    np.testing.assert_array_equal(np.stack(on_device.gemm_many(a, b, order="F")), a @ b)
    remote = [on_device.put(each) for each in a[:5]]
    found = on_device.gemm_reduce_many(remote, list(b[:5]), reduce="absmax")
    np.testing.assert_array_equal(np.stack([each.numpy() for each in found]), np.abs(a[:5] @ b[:5]).max(axis=1))


def test_a_check_and_a_program(on_device, rng):
    a = matrix(rng, 64, 64)
    ra = on_device.put(a)
    job = on_device.submit("gemm", ra, ra, verify=True)
    job.wait(60)
    assert job.info.residual == 0
    with on_device.program() as program:
        square = program.gemm(ra, ra)
        fourth = square @ square
    np.testing.assert_array_equal(fourth.numpy(), (a @ a) @ (a @ a))


def test_elements_that_left_the_planned_way_are_told(device, on_device, rng):
    """The stand-in counts 3 and 1 for each result with alpha 17: of a job, a program, a batch, a single request."""

    def told(info):
        return info.elements, info.wide_share, info.fallback_share

    a = matrix(rng, 20, 20)
    ra = on_device.put(a)
    once, twice = ({"planned": n * 396, "wide": n * 3, "plain": n} for n in (1, 2))
    before = metric(device)
    for options in ({}, {"verify": True}, {"compute": "fp32"}):
        job = on_device.submit("gemm", ra, ra, alpha=17, **options)
        job.wait(60)
        assert told(job.info) == (once, 3 / 400, 1 / 400)
    usual = on_device.submit("gemm", ra, ra)
    usual.wait(60)
    assert told(usual.info) == (None, None, None)
    with on_device.program() as program:
        last = program.gemm(program.gemm(ra, ra, alpha=17), ra, alpha=17)
    last.numpy()
    with device.http() as http:
        (of_program,) = http.get("/v1/jobs?limit=1").json()["items"]
        assert (of_program["op"], of_program["elements"]) == ("program", twice)
        assert (of_program["wide_share"], of_program["fallback_share"]) == (6 / 800, 2 / 800)
        body = {"params": {"op": "gemm", "alpha": 17}, "items": [{"a": ra.id, "b": ra.id}] * 2, "results": "each"}
        answer = http.post("/v1/batch", json=body)
        assert answer.json()["elements"] == twice
        assert answer.headers["Gemm-Elements"] == "planned=792, wide=6, plain=2"
        for size, alpha in ((20, 17), (300, 17), (20, 1)):
            x = matrix(rng, size, size)
            files = {name: npy(x) for name in "ab"} | {"params": json.dumps({"alpha": alpha})}
            one_shot = http.post("/v1/gemm", files=files)
            expected = f"planned={size * size - 4}, wide=3, plain=1" if alpha == 17 else None
            assert one_shot.headers.get("Gemm-Elements") == expected
        spent = {route: count - before[route] for route, count in metric(device).items()}
    assert spent == {"planned": 9 * 396 + 300 * 300 - 4 - 396, "wide": 9 * 3, "plain": 9}


def metric(device):
    with device.http() as http:
        lines = http.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("gemmserve_result_elements_total")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in found}


def npy(array):
    memory = io.BytesIO()
    np.save(memory, array)
    return memory.getvalue()


def test_wrong_results_are_found_on_the_device_and_replaced(device, on_device, rng):
    """The stand-in's fast products with alpha 13 are wrong: alone, of prepared operands, in a program, in a batch."""
    a = matrix(rng, 300, 300)  # a result that would stay on the device
    ra = on_device.put(a)

    for _ in range(3):
        job = on_device.submit("gemm", ra, ra, alpha=13, verify=True)
        np.testing.assert_array_equal(job.result().numpy(), 13 * (a @ a))
        assert job.info.residual == 0
        assert job.info.mismatch > 1e-4
        assert job.info.timings["verify_s"] > 0
    with on_device.program(verify=True) as program:
        last = program.gemm(program.gemm(ra, ra, alpha=13), ra, beta=0)
    np.testing.assert_allclose(last.numpy(), 13 * (a @ a @ a), rtol=1e-6)
    right = on_device.submit("gemm", ra, ra, verify=True)
    np.testing.assert_array_equal(right.result().numpy(), a @ a)
    assert (right.info.residual, right.info.mismatch) == (0, None)
    reduced = on_device.submit("gemm_reduce", ra, ra, reduce=["absmax"], axis="m", verify=True)
    reduced.wait(60)
    assert reduced.info.residual < 1e-6
    small = [on_device.put(matrix(rng, 20, 20)) for _ in range(3)]
    items = [{"a": each.id, "b": each.id} for each in small]
    with device.http() as http:
        body = {"params": {"op": "gemm", "alpha": 13}, "items": items, "results": "each", "verify": True}
        told = http.post("/v1/batch", json=body).json()
        found = [np.load(io.BytesIO(http.get(f"/v1/arrays/{x['result']['d']}/data").content)) for x in told["items"]]
    assert told["residual"] == 0, "of those that took their place"
    for each, d in zip(small, found, strict=True):
        np.testing.assert_array_equal(d, 13 * (each.numpy() @ each.numpy()))


def test_a_killed_worker_loses_nothing(device, on_device, rng):
    arrays = [matrix(rng, 50, 50) for _ in range(30)]
    remote = [on_device.put(array) for array in arrays]
    jobs = [on_device.submit("gemm", each, each) for each in remote[:10]]
    (worker,) = device.workers()
    worker.suspend()  # at whatever it does then
    jobs += [on_device.submit("gemm", each, each) for each in remote[10:]]
    worker.kill()
    for array, job in zip(arrays, jobs, strict=True):
        np.testing.assert_array_equal(job.result().numpy(), array @ array)
    assert max(job.info.attempt for job in jobs) == 2
    device.wait_ready()


def test_cancelled_jobs_do_not_hold_up_others(device, on_device, rng):
    ra = on_device.put(matrix(rng, LARGE, LARGE))
    (worker,) = device.workers()
    worker.suspend()
    jobs = [on_device.submit("gemm", ra, ra) for _ in range(20)]
    for job in jobs[1::2]:
        job.cancel()
    worker.resume()
    for job in jobs[::2]:
        job.wait(60)
        assert job.state == "succeeded"
    assert all(job.state == "cancelled" for job in jobs[1::2])


@pytest.mark.parametrize("rows", [5, LARGE])
def test_operands_by_view(device, on_device, rng, rows):
    a, b = matrix(rng, rows, 40), np.asfortranarray(matrix(rng, rows, 30))
    ra, rb = on_device.put(a), on_device.put(b)
    backwards = {"id": ra.id, "offset": rows * 40 - 1, "shape": [20, rows], "strides": [-2, -40], "conj": True}
    asked = {"a": backwards, "b": {"id": rb.id, "offset": rows, "shape": [rows, 10], "strides": [1, 3 * rows]}}
    expected = a[::-1, ::-2].conj().T @ b[:, 1::3]
    for verify in (False, True):
        job = {"op": "gemm", **asked, "verify": verify}
        answer = httpx.post(f"{device.url}/v1/jobs", json=job, headers={"Prefer": "wait=60"}, trust_env=False)
        assert answer.status_code == 200, answer.text
        found = on_device.array(answer.json()["result"]["d"]).numpy()
        np.testing.assert_array_equal(found, expected)
    first = {"id": ra.id, "offset": rows * 40 - 1, "shape": [30], "strides": [-1], "conj": True}
    steps = [{"id": "copy", "op": "add", "a": {"id": rb.id, "part": "imag"}, "b": first}]
    job = {"op": "program", "steps": steps, "ttl_s": 60}
    answer = httpx.post(f"{device.url}/v1/jobs", json=job, headers={"Prefer": "wait=60"}, trust_env=False)
    found = on_device.array(answer.json()["result"]["copy"]).numpy()
    np.testing.assert_array_equal(found, b.imag + a.ravel()[::-1][:30].conj())


@pytest.mark.parametrize("megabytes", [8, 64])
def test_a_product_larger_than_the_device(tmp_path, rng, megabytes):
    """By blocks, in less memory than one of its operands takes; or in more, with an operand that is a result, which may
    be on the device alone.
    """
    bounded = {"GEMMSERVE_BLOCK_SIDE": "64", "GEMMSERVE_DEVICE_MEMORY_BYTES": f"{megabytes}M"}
    with LiveServer(data_dir=tmp_path, environment=DEVICE | bounded) as live, Client(live.url) as client:
        # What is loaded ahead takes memory too, for a moment.
        with live.http() as http:
            until(lambda: 'gemmserve_device_preparing{device="cuda:0"} 0.0' in http.get("/metrics").text)
        a, b = matrix(rng, LARGE, 2000), matrix(rng, 2000, LARGE)
        ra, rb = client.put(a), client.put(b)
        job = client.submit("gemm", ra if megabytes == 8 else 1 * ra, rb, alpha=2, verify=True).wait(120)
        assert (job.state, job.info.attempt) == ("succeeded", 1), job.info.error
        assert job.info.residual < 1e-5
        np.testing.assert_array_equal(job.result().numpy(), 2 * a @ b)
        np.testing.assert_array_equal(client.gemm(b, a, trans_a="C", trans_b="T", order="F"), b.conj().T @ a.T)
        np.testing.assert_array_equal((ra @ rb).numpy(), a @ b)  # a small one beside it finds the device as it was
