"""/v1/gemm and /v1/gemm-reduce through the app."""

from __future__ import annotations

import asyncio
import io
import json

import numpy as np
import pytest


@pytest.fixture
def one_shot(client, npy, form):
    async def call(path, params=None, *, params_first=True, headers=None, **arrays):
        parts = [(name, npy(array)) for name, array in arrays.items()]
        if params is not None:
            parts.insert(0 if params_first else len(parts), ("params", json.dumps(params).encode()))
        content, content_type = form(parts)
        return await client.post(path, content=content, headers=content_type | (headers or {}))

    return call


@pytest.fixture(autouse=True)
async def nothing_is_kept(client):
    yield
    assert (await client.get("/v1/arrays")).json()["items"] == []
    assert (await client.get("/v1/jobs")).json()["items"] == []
    async with asyncio.timeout(60):  # what was cancelled is at an end once the worker has answered
        while (usage := (await client.get("/v1/usage")).json())["scratch_bytes"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert usage["store_bytes"] == 0


async def test_the_simplest_product(one_shot, read_npy, random_array):
    a, b = random_array((17, 23)), random_array((23, 5), seed=1)
    answer = await one_shot("/v1/gemm", a=a, b=b)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-npy"), answer.text
    assert np.allclose(read_npy(answer.content), a @ b, rtol=1e-4, atol=1e-5)
    assert answer.headers["content-length"] == str(len(answer.content))
    assert answer.headers["gemm-algorithm"]
    phases = dict(entry.split(";dur=") for entry in answer.headers["server-timing"].split(", "))
    assert set(phases) == {"receive", "queue", "h2d", "kernel", "d2h", "handover"}
    assert all(float(value) >= 0 for value in phases.values())


@pytest.mark.parametrize("params_first", [True, False])
async def test_alpha_beta_and_order(one_shot, read_npy, random_array, params_first):
    a, b, c = (random_array(shape, "complex128", seed) for seed, shape in enumerate([(6, 4), (6, 5), (4, 5)]))
    params = {"op": "gemm", "alpha": [0, 1], "beta": [1, 1], "trans_a": "C", "order": "F"}
    answer = await one_shot("/v1/gemm", params, params_first=params_first, a=a, b=b, c=c)
    d = read_npy(answer.content)
    assert np.allclose(d, 1j * a.conj().T @ b + (1 + 1j) * c)
    assert d.flags.f_contiguous


@pytest.mark.parametrize("params_first", [True, False])
async def test_beta_that_is_not_given_is_1_with_c(one_shot, read_npy, random_array, params_first):
    a, b, c = (random_array(shape, "complex128", seed) for seed, shape in enumerate([(4, 6), (6, 5), (4, 5)]))
    for params, expected in (({}, a @ b + c), ({"beta": None}, a @ b + c), ({"beta": 0}, a @ b)):
        answer = await one_shot("/v1/gemm", params, params_first=params_first, a=a, b=b, c=c)
        assert np.allclose(read_npy(answer.content), expected)


async def test_fortran_and_big_endian_parts(one_shot, read_npy, random_array):
    a = np.asfortranarray(random_array((6, 4)))
    b = random_array((4, 5), seed=1).astype(">c8")
    answer = await one_shot("/v1/gemm", a=a, b=b)
    assert np.allclose(read_npy(answer.content), a @ b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("m", [0, 3])
@pytest.mark.parametrize("k", [0, 4])
async def test_empty_extents(one_shot, read_npy, m, k):
    answer = await one_shot("/v1/gemm", a=np.ones((m, k)), b=np.ones((k, 2)))
    assert np.array_equal(read_npy(answer.content), np.ones((m, k)) @ np.ones((k, 2)))


async def test_one_reduction_is_a_npy(one_shot, read_npy, random_array):
    a, b = random_array((3, 8, 6)), random_array((6, 4), seed=1)
    answer = await one_shot("/v1/gemm-reduce", {"reduce": "sumsq", "axis": ["m", "batch"]}, a=a, b=b)
    assert answer.headers["content-type"] == "application/x-npy"
    assert np.allclose(read_npy(answer.content), (abs(a @ b) ** 2).sum((0, 1)), rtol=1e-4)


async def test_several_are_an_npz(one_shot, random_array):
    a, b = random_array((8, 6)), random_array((6, 4), seed=1)
    answer = await one_shot("/v1/gemm-reduce", {"reduce": ["absmax", "sum"], "return_c": True}, a=a, b=b)
    assert answer.headers["content-type"] == "application/x-npz"
    results = np.load(io.BytesIO(answer.content))
    assert list(results) == ["absmax", "sum", "c"]
    assert np.allclose(results["sum"], (a @ b).sum(0), rtol=1e-3, atol=1e-4)
    assert np.allclose(results["absmax"], abs(a @ b).max(0), rtol=1e-4)


async def test_a_result_larger_than_a_piece(one_shot, read_npy, random_array):
    a, b = random_array((600, 8)), random_array((8, 700), seed=1)
    answer = await one_shot("/v1/gemm", a=a, b=b)
    assert np.allclose(read_npy(answer.content), a @ b, rtol=1e-3, atol=1e-4)


async def test_accept(one_shot, problem):
    eye = np.eye(2)
    assert (await one_shot("/v1/gemm", a=eye, b=eye, headers={"Accept": "application/x-npy"})).status_code == 200
    problem(await one_shot("/v1/gemm", a=eye, b=eye, headers={"Accept": "text/html"}), 406, "not-acceptable")


async def test_params_must_be_an_object(client, npy, form, problem):
    for text, status, slug in (
        (b"[]", 422, "parameter-invalid"),
        (b"{", 400, "malformed-json"),
        (b"", 400, "malformed-json"),
    ):
        content, headers = form([("a", npy(np.eye(2))), ("b", npy(np.eye(2))), ("params", text)])
        problem(await client.post("/v1/gemm", content=content, headers=headers), status, slug)


async def test_the_other_operation_is_refused(one_shot, problem):
    eye = np.eye(2)
    problem(await one_shot("/v1/gemm", {"op": "gemm_reduce"}, a=eye, b=eye), 422, "parameter-invalid")
    problem(await one_shot("/v1/gemm-reduce", a=eye, b=eye, c=eye), 422, "parameter-invalid")


async def test_deadline(one_shot, spy, problem):
    spy.hold = True
    eye = np.eye(2)
    problem(await one_shot("/v1/gemm?timeout_s=0.1", a=eye, b=eye), 504, "timeout")
    spy.release()


async def test_many_at_once(one_shot, read_npy, random_array):
    pairs = [(random_array((20, 10), seed=seed), random_array((10, 20), seed=99 - seed)) for seed in range(20)]
    answers = await asyncio.gather(*(one_shot("/v1/gemm", a=a, b=b) for a, b in pairs))
    for (a, b), answer in zip(pairs, answers, strict=True):
        assert np.allclose(read_npy(answer.content), a @ b, rtol=1e-3, atol=1e-4)


async def test_operands_without_elements_cost_what_they_make(one_shot, read_npy):
    """459 bytes that kept the only worker for minutes."""
    params = {"reduce": "sum", "axis": "m"}
    answer = await one_shot("/v1/gemm-reduce", params, a=np.empty((1 << 40, 0)), b=np.empty((0, 4)))
    assert answer.status_code == 200, answer.text
    assert read_npy(answer.content).tolist() == [0] * 4
    answer = await one_shot("/v1/gemm", a=np.empty((1 << 20, 0)), b=np.empty((0, 1 << 20)))
    assert (answer.status_code, answer.json()["type"]) == (413, "/problems/too-large")


async def test_who_is_cancelled_in_the_turn_in_which_the_product_ends_leaves_nothing(
    client, core, form, npy, monkeypatch
):
    run = core.jobs.run

    async def ends(*arguments, **fields):
        done = await run(*arguments, **fields)
        assert core.store.scratch_bytes
        request.cancel()
        return done

    monkeypatch.setattr(core.jobs, "run", ends)
    content, headers = form([("a", npy(np.eye(4))), ("b", npy(np.eye(4)))])
    request = asyncio.ensure_future(client.post("/v1/gemm", content=content, headers=headers))
    await asyncio.wait([request])
    assert request.cancelled()
    assert core.store.scratch_bytes == 0
