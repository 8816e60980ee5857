"""Operands by view over HTTP: products and programs of them, what is refused, whose arrays they may show."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from gemmserve_service.runtime.ids import new_id

A = np.asfortranarray((np.arange(30.0).reshape(5, 6) - 7 + 2j * np.arange(5)[:, None]).astype("c8"))
WAIT = {"Prefer": "wait=60"}


@pytest.fixture
def put(client, npy):
    async def upload(array, by=client, **query):
        headers = {"Content-Type": "application/x-npy"}
        answer = await by.post("/v1/arrays", content=npy(array), headers=headers, params=query)
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    return upload


async def fetch(client, array_id):
    answer = await client.get(f"/v1/arrays/{array_id}/data", headers={"Accept": "application/octet-stream"})
    info = (await client.get(f"/v1/arrays/{array_id}")).json()
    return np.frombuffer(answer.content, info["dtype"]).reshape(info["shape"], order=info["order"])


def view(name, offset=0, shape=None, strides=None, **fields):
    extents = {} if shape is None else {"shape": shape, "strides": strides}
    return {"id": name, "offset": offset, **extents, **fields}


async def submit(client, **job):
    return await client.post("/v1/jobs", json=job, headers=WAIT)


async def test_a_product_of_views_is_a_product(client, put):
    a = await put(A)
    rows = view(a, 1, [2, 6], [2, 5])  # rows 1 and 3: the array lies in Fortran order
    answer = await submit(
        client, op="gemm", a=rows, b=view(a, conj=True), trans_b="T", beta=2,
        c=view(a, 4, [2, 5], [0, 5]), verify=True,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    job = answer.json()
    assert (job["state"], job["op"], job["algorithm"], list(job["result"])) == ("succeeded", "gemm", "numpy", ["d"])
    assert job["steps"] is None
    assert job["residual"] < 1e-6
    assert job["request"]["a"] == {**rows, "conj": False, "part": None}
    np.testing.assert_array_equal(await fetch(client, job["result"]["d"]), A[1:4:2] @ A.conj().T + 2 * A[4, :5])


@pytest.mark.parametrize("reduce", ["sum", ["absmax", "sum"]])
async def test_a_reduction_of_views_has_the_names_of_a_reduction(client, put, reduce):
    a = await put(A)
    asked = {"op": "gemm_reduce", "a": view(a, part="imag"), "b": a, "trans_b": "T", "reduce": reduce}
    answer = await submit(client, **asked, return_c=True)
    result = answer.json()["result"]
    product = A.imag @ A.T
    assert list(result) == [*([reduce] if isinstance(reduce, str) else reduce), "c"]
    np.testing.assert_array_equal(await fetch(client, result["sum"]), product.sum(axis=0))
    np.testing.assert_array_equal(await fetch(client, result["c"]), product)


async def test_several_jobs_some_of_views(client, put):
    a = await put(A)
    jobs = [{"op": "gemm", "a": a, "b": a, "trans_b": "T"}, {"op": "gemm", "a": view(a), "b": a, "trans_b": "T"}]
    answer = await submit(client, jobs=jobs)
    found = [await fetch(client, job["result"]["d"]) for job in answer.json()["jobs"]]
    np.testing.assert_array_equal(*found)
    jobs[1]["b"] = view(a, 0, [6, 6], [1, 1000])
    problem = (await submit(client, jobs=jobs)).json()
    assert (problem["pointer"], problem["parameter"], problem["item"]) == ("/jobs/1", "b.strides", 1)


async def test_a_copy_of_a_view_is_what_is_downloaded_of_it(client, put):
    a = await put(A)
    step = {"id": "copy", "op": "add", "a": view(a, 29, [3, 2], [-10, -2], conj=True), "order": "F"}
    answer = await submit(client, op="program", steps=[step], ttl_s=60)
    result = answer.json()["result"]["copy"]
    np.testing.assert_array_equal(await fetch(client, result), A[::-2, ::-2][:2, :3].T.conj())
    rows = await client.get(
        f"/v1/arrays/{a}/data", headers={"Accept": "application/octet-stream", "Range": "bytes=40-119"}
    )
    assert rows.status_code == 206
    np.testing.assert_array_equal(np.frombuffer(rows.content, "c8"), A[:, 1:3].ravel("F"))


@pytest.mark.parametrize(
    ("wrong", "status", "parameter"),
    [
        ({"offset": 1, "shape": [5, 6], "strides": [6, 1]}, 422, "a.strides"),
        ({"offset": 30, "shape": [1, 1], "strides": [1, 1]}, 422, "a.offset"),
        ({"offset": 3, "shape": [2, 2], "strides": [-4, 1]}, 422, "a.strides"),
        ({"offset": 3}, 422, "a.offset"),
        ({"shape": [2, 2], "strides": [1]}, 422, "a.strides"),
        ({"shape": [2, 2]}, 422, "a"),
        ({"shape": [1] * 33, "strides": [1] * 33}, 422, "a.shape"),
        ({"shape": [2, 2], "strides": [2**62, -(2**62)]}, 422, "a.strides"),
        ({"shape": [2, 2], "strides": [2**63, 1]}, 422, "a.strides.0"),
        ({"shape": [2, 2], "strides": [10**4000, 1]}, 422, "a.strides.0"),
        ({"shape": [2, 2], "strides": [1e3, 1]}, 422, "a.strides.0"),
        ({"conj": True, "part": "imag"}, 422, "a"),
        ({"id": "$x"}, 422, "a.id"),
        ({"id": "arr_" + "0" * 26}, 404, None),
        ({"shape": [10**6, 10**6], "strides": [0, 0]}, 413, None),
    ],
)
async def test_refused(client, put, spy, wrong, status, parameter):
    a = await put(A)
    answer = await submit(client, op="gemm", a=view(a) | wrong, b=a)
    problem = answer.json()
    assert (answer.status_code, problem.get("parameter")) == (status, parameter), problem
    assert "step" not in problem
    assert not spy.sent


async def test_an_operand_that_is_no_id_is_said_to_be_none(client, put):
    a = await put(A)
    problem = (await submit(client, op="gemm", a="nothing", b=a)).json()
    assert [error["field"] for error in problem["errors"]] == ["a"]
    assert "must be the id of an array" in problem["detail"]
    assert "ArrayView" not in problem["detail"]


async def test_views_of_nothing(client, put):
    a = await put(A)
    answer = await submit(client, op="gemm", a=view(a, 10**9, [3, 0], [1, 7]), b=view(a, 0, [0, 2], [9, 9]))
    np.testing.assert_array_equal(await fetch(client, answer.json()["result"]["d"]), np.zeros((3, 2)))


async def test_another_owners_arrays_are_not_seen(as_, put):
    alice, bob = as_("alice", scopes=["read", "submit"]), as_("bob", scopes=["read", "submit"])
    hers, his = await put(A, by=alice), await put(A, by=bob)
    answer = await submit(bob, op="gemm", a=his, b=view(hers, 0, [6, 1], [5, 1]))
    assert (answer.status_code, answer.json()["type"]) == (404, "/problems/not-found")
    steps = [{"id": "x", "op": "add", "a": view(hers)}]
    answer = await submit(bob, op="program", steps=steps)
    assert (answer.status_code, answer.json()["pointer"]) == (404, "/steps/0/a")


async def test_an_array_that_is_gone(client, put):
    a = await put(A, ttl_s=0.05)
    async with asyncio.timeout(60):
        while (await client.get(f"/v1/arrays/{a}")).status_code == 200:  # noqa: ASYNC110 (it passes by itself)
            await asyncio.sleep(0.01)
    answer = await submit(client, op="gemm", a=view(a, 0, [2, 2], [1, 1]), b=view(a, 0, [2, 2], [1, 1]))
    assert (answer.status_code, answer.json()["type"]) == (410, "/problems/gone")


async def test_an_operand_is_kept_as_long_as_a_view_of_it_is_needed(client, put, spy, core):
    spy.hold = True
    a = await put(A)
    answer = await client.post("/v1/jobs", json={"op": "gemm", "a": view(a, part="real"), "b": view(a, part="real")
                                                | {"shape": [6, 1], "strides": [5, 1]}})  # fmt: skip
    assert (await client.delete(f"/v1/arrays/{a}")).status_code == 204
    spy.release()
    job = (await client.get(answer.headers["Location"], params={"wait": 60})).json()
    np.testing.assert_array_equal(await fetch(client, job["result"]["d"]), A.real @ A.real[:1].T)
    unknown = new_id("arr")
    assert (await submit(client, op="gemm", a=view(unknown), b=view(unknown))).status_code == 404
