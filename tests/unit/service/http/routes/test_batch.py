"""/v1/batch through the app: the results, what is wrong with one of many, and what is refused as a whole."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import threading
from collections import Counter

import numpy as np
import pytest

from gemmserve_service.errors import StoreFull
from gemmserve_service.http.requests import batch_bodies, batch_items
from gemmserve_service.http.requests.batch_items import StoredItems, parse_params
from gemmserve_service.runtime import yielding
from gemmserve_service.store.upload import Upload


@pytest.fixture
def sent(client, form, npy):
    """Posts operands; each is an array, or a list that goes as several files in one part."""

    async def post(params=None, *, path="/v1/batch", headers=None, boundary=b"XbX", **operands):
        parts = [] if params is None else [("params", json.dumps(params).encode())]
        for name, value in operands.items():
            arrays = value if isinstance(value, list) else [value]
            parts.append((name, b"".join(map(npy, arrays))))
        content, content_type = form(parts, boundary)
        return await client.post(path, content=content, headers=content_type | (headers or {}))

    return post


@pytest.fixture
def stored(client):
    """Posts items on stored arrays."""

    async def post(items, **fields):
        return await client.post("/v1/batch", json={"items": items, **fields})

    return post


@pytest.fixture
def fetch(client, read_npy):
    async def get(array_id):
        answer = await client.get(f"/v1/arrays/{array_id}/data")
        assert answer.status_code == 200, answer.text
        return read_npy(answer.content)

    return get


@pytest.fixture
def alone(client, form, npy, read_npy):
    """The result of one product by /v1/gemm."""

    async def multiply(params, **operands):
        content, headers = form([("params", json.dumps(params).encode())] + [(n, npy(x)) for n, x in operands.items()])
        answer = await client.post("/v1/gemm", content=content, headers=headers)
        assert answer.status_code == 200, answer.text
        return read_npy(answer.content)

    return multiply


def npz(answer):
    assert answer.headers["content-type"] == "application/x-npz", answer.text[:300]
    return np.load(io.BytesIO(answer.content))


async def nothing_held(client):
    usage = (await client.get("/v1/usage")).json()
    return usage["scratch_bytes"] == 0 and usage["jobs_running"] == 0 and usage["jobs_queued"] == 0


async def test_stacks_give_a_stack_with_the_bits_of_single_products(sent, alone, read_npy, random_array, client):
    a, b = random_array((7, 12, 5)), random_array((7, 5, 9), seed=1)
    for params in ({}, {"alpha": [0, 2]}, {"trans_a": "R", "alpha": 0.5}, {"compute": "fp64"}):
        answer = await sent(params, a=a, b=b)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-npy"), answer.text
        assert answer.headers["gemm-algorithm"]
        assert "receive;dur=" in answer.headers["server-timing"]
        d = read_npy(answer.content)
        assert d.shape == (7, 12, 9)
        for i in range(7):
            assert d[i].tobytes() == (await alone(params, a=a[i], b=b[i])).tobytes()
    assert await nothing_held(client)


@pytest.mark.parametrize("boundary", [b"X", b"XX", b"XXX", b"XXXX", b"XXXXX", b"XXXXXX", b"XXXXXXX", b"XXXXXXXX"])
async def test_data_may_lie_at_any_address(sent, read_npy, random_array, boundary):
    a, b = random_array((3, 4, 5), "complex128"), random_array((3, 5, 2), "complex128", seed=1)
    d = read_npy((await sent({}, a=a, b=b.astype(">c16"), boundary=boundary)).content)
    assert np.allclose(d, a @ b)


async def test_one_matrix_is_used_by_every_product(sent, alone, read_npy, random_array):
    a, b = random_array((5, 6, 4)), random_array((4, 3), seed=1)
    c = random_array((6, 3), seed=2)
    d = read_npy((await sent({"beta": 2}, a=a, b=b, c=c)).content)
    for i in range(5):
        assert d[i].tobytes() == (await alone({"beta": 2}, a=a[i], b=b, c=c)).tobytes()
    assert np.allclose(read_npy((await sent({}, a=a, b=b, c=c)).content), a @ b + c, rtol=1e-4, atol=1e-5)


async def test_lists_of_unequal_shapes(sent, alone, random_array):
    shapes = [(3, 4, 5), (3, 4, 5), (7, 1, 2), (64, 64, 64), (3, 0, 2), (0, 4, 5)]
    a = [random_array((m, k), seed=i) for i, (m, k, _) in enumerate(shapes)]
    b = [np.asfortranarray(random_array((k, n), seed=i + 50)) for i, (_, k, n) in enumerate(shapes)]
    results = npz(await sent({"trans_b": "N"}, a=a, b=b))
    assert list(results) == [f"d_{i}" for i in range(6)]
    for i in range(6):
        assert results[f"d_{i}"].tobytes() == (await alone({}, a=a[i], b=b[i])).tobytes()
        assert results[f"d_{i}"].shape == (shapes[i][0], shapes[i][2])


async def test_what_is_wrong_with_one_is_told_of_it_alone(sent, random_array, client):
    a = [random_array((2, 3)), random_array((2, 4)), random_array((5, 3))]
    b = [random_array((3, 2))] * 3
    answer = await sent({}, a=a, b=b)
    assert (answer.status_code, answer.headers["batch-failed"]) == (200, "1")
    results = npz(answer)
    assert sorted(results) == ["d_0", "d_2", "problems.json"]
    problems = json.loads(results["problems.json"])
    assert problems["1"]["type"] == "/problems/shape-mismatch"
    assert np.allclose(results["d_2"], a[2] @ b[2], rtol=1e-4, atol=1e-5)
    all_wrong = npz(await sent({}, a=[a[1]] * 2, b=b[:2]))
    assert list(all_wrong) == ["problems.json"]
    assert await nothing_held(client)


async def test_reductions(sent, read_npy, random_array):
    a, b = random_array((4, 8, 6)), random_array((4, 6, 5), seed=1)
    answer = await sent({"op": "gemm_reduce", "reduce": "sumsq", "axis": "m"}, a=a, b=b)
    assert np.allclose(read_npy(answer.content), (abs(a @ b) ** 2).sum(1), rtol=1e-4)
    several = npz(await sent({"op": "gemm_reduce", "reduce": ["sum", "absmax"]}, a=a, b=b))
    assert {name: several[name].shape for name in several} == {"sum": (4, 5), "absmax": (4, 5)}
    assert np.allclose(several["absmax"], abs(a @ b).max(1), rtol=1e-4)


async def test_a_result_in_fortran_order_is_no_stack(sent, random_array):
    a, b = random_array((2, 3, 4)), random_array((2, 4, 5))
    results = npz(await sent({"order": "F"}, a=a, b=b))
    assert results["d_1"].flags.f_contiguous
    assert np.allclose(results["d_1"], a[1] @ b[1], rtol=1e-4, atol=1e-5)


async def test_empty_batches_and_empty_matrices(sent, read_npy, problem):
    assert read_npy((await sent({}, a=np.ones((3, 0, 2)), b=np.ones((3, 2, 4)))).content).shape == (3, 0, 4)
    assert (
        read_npy((await sent({}, a=np.ones((2, 3, 0)), b=np.ones((2, 0, 4)))).content).tolist()
        == np.zeros((2, 3, 4)).tolist()
    )
    answer = await sent({}, a=np.ones((0, 3, 2)), b=np.ones((0, 2, 4)))
    assert list(npz(answer)) == []


class TestStored:
    async def test_inline(self, stored, put, alone, read_npy, random_array):
        a = [random_array((4, 5), seed=i) for i in range(3)]
        b = random_array((5, 6), seed=9)
        ids, b_id = [await put(x) for x in a], await put(b)
        answer = await stored([{"a": x, "b": b_id} for x in ids])
        d = read_npy(answer.content)
        for i in range(3):
            assert d[i].tobytes() == (await alone({}, a=a[i], b=b)).tobytes()

    async def test_packed_and_each_are_arrays(self, stored, put, fetch, random_array, client):
        a, b = random_array((4, 5)), random_array((5, 6), seed=1)
        a_id, b_id = await put(a), await put(b)
        items = [{"a": a_id, "b": b_id}, {"a": a_id, "b": b_id, "alpha": 3}]
        packed = (await stored(items, results="packed", ttl_s=100)).json()
        assert [item["state"] for item in packed["items"]] == ["succeeded"] * 2
        d = await fetch(packed["result"]["d"])
        assert np.allclose(d, np.stack([a @ b, 3 * (a @ b)]), rtol=1e-4, atol=1e-5)
        assert packed["timings"]["kernel_s"] > 0
        info = (await client.get(f"/v1/arrays/{packed['result']['d']}")).json()
        assert info["expires_at"] is not None
        each = (await stored(items, results="each")).json()
        assert each["result"] is None
        assert np.array_equal(await fetch(each["items"][1]["result"]["d"]), d[1])

    async def test_unequal_shapes_and_overrides(self, stored, put, fetch, random_array, problem):
        a, b = random_array((4, 5)), random_array((6, 4), seed=1)
        a_id, b_id = await put(a), await put(b)
        items = [{"a": b_id, "b": a_id}, {"a": a_id, "b": b_id, "trans_a": "T", "trans_b": "C"}]
        each = (await stored(items, results="each")).json()
        assert np.allclose(await fetch(each["items"][0]["result"]["d"]), b @ a, rtol=1e-4, atol=1e-5)
        assert np.allclose(await fetch(each["items"][1]["result"]["d"]), a.T @ b.conj().T, rtol=1e-4, atol=1e-5)
        problem(await stored(items, results="packed"), 422, "parameter-invalid")

    async def test_one_item_s_problem(self, stored, put, problem, random_array):
        a_id = await put(random_array((4, 4)))
        items = [
            {"a": a_id, "b": a_id},
            {"a": a_id, "b": "arr_" + "0" * 26},
            {"a": a_id, "b": a_id, "nonsense": 1},
            {"a": a_id, "b": a_id, "beta": 2},
        ]
        told = (await stored(items, results="each")).json()["items"]
        assert [item["state"] for item in told] == ["succeeded"] + ["failed"] * 3
        slugs = [item["error"]["type"].removeprefix("/problems/") for item in told[1:]]
        assert slugs == ["not-found", "parameter-invalid", "parameter-invalid"]
        problem(await stored(items, results="packed"), 404, "not-found")

    async def test_verify(self, stored, put, random_array):
        a_id = await put(random_array((20, 20)))
        told = (await stored([{"a": a_id, "b": a_id}] * 3, results="each", verify=True)).json()
        assert 0 <= told["residual"] < 1e-5

    async def test_operands_of_others_are_not_found(self, client, as_, npy, problem):
        alice, bob = as_("alice"), as_("bob")
        headers = {"Content-Type": "application/x-npy"}
        a_id = (await alice.post("/v1/arrays", content=npy(np.eye(3)), headers=headers)).json()["id"]
        body = {"items": [{"a": a_id, "b": a_id}], "results": "each"}
        told = (await bob.post("/v1/batch", json=body)).json()["items"]
        assert told[0]["error"]["type"] == "/problems/not-found"
        assert (await alice.post("/v1/batch", json=body)).json()["items"][0]["state"] == "succeeded"

    async def test_refused_as_a_whole(self, client, stored, put, problem):
        a_id = await put(np.eye(2))
        item = {"a": a_id, "b": a_id}
        problem(await stored([]), 422, "parameter-invalid")
        problem(await stored([item], nonsense=1), 422, "parameter-invalid")
        for wrong in (3, None, {"a": a_id}, {"a": a_id, "b": "nothing"}, {"a": a_id, "b": a_id, "c": 1}):
            document = problem(await stored([item, wrong]), 422, "parameter-invalid")
            assert document["errors"][0]["field"].startswith("items.1")
        problem(await stored([item], params={"op": "steps"}), 422, "parameter-invalid")
        problem(await stored([item], params={"alpha": "x"}), 422, "parameter-invalid")
        problem(await stored([item], results="none"), 422, "parameter-invalid")
        headers = {"Content-Type": "application/json"}
        problem(await client.post("/v1/batch", content=b"{", headers=headers), 400, "malformed-json")
        problem(await client.post("/v1/batch", content=b"", headers=headers), 400, "invalid-request")
        headers = {"Content-Type": "text/plain"}
        problem(await client.post("/v1/batch", content=b"x", headers=headers), 415, "unsupported-media-type")

    async def test_a_large_document_counts_as_long_as_it_is_read(self, client, app, put, problem):
        a_id = await put(np.eye(3))
        document = json.dumps({"items": [{"a": a_id, "b": a_id}]}).encode() + b" " * (1 << 20)
        headers = {"Content-Type": "application/json"}
        store, used = app.state.core.store, []

        async def pieces(body):
            for start in range(0, len(body), 1 << 18):
                used.append(store.scratch_bytes)
                yield body[start : start + (1 << 18)]

        sized = headers | {"Content-Length": str(len(document))}
        answer = await client.post("/v1/batch", content=pieces(document), headers=sized)
        assert answer.status_code == 200, answer.text
        assert max(used) >= len(document)
        assert store.scratch_bytes == 0
        problem(await client.post("/v1/batch", content=pieces(document), headers=headers), 413, "too-large")
        large = b" " * (17 << 20)
        problem(await client.post("/v1/batch", content=large, headers=headers), 413, "too-large")

    async def test_a_large_document_is_read_where_it_was_received(self, client, put, monkeypatch):
        """A copy of sixteen megabytes took 8 ms of everybody's time, and stayed with the process."""
        received, read = [], []
        receive, read_items = batch_bodies.receive_whole, StoredItems.read

        async def watch_receiving(*args):
            received.append(await receive(*args))
            read.append(np.frombuffer(received[-1].view, np.uint8))
            return received[-1]

        async def watch_reading(body, settings):
            assert np.shares_memory(np.frombuffer(body, np.uint8), read.pop())
            return await read_items(body, settings)

        monkeypatch.setattr(batch_bodies, "receive_whole", watch_receiving)
        monkeypatch.setattr(StoredItems, "read", watch_reading)
        a_id = await put(np.eye(3))
        document = json.dumps({"items": [{"a": a_id, "b": a_id}]}).encode() + b" " * (1 << 20)
        answer = await client.post("/v1/batch", content=document, headers={"Content-Type": "application/json"})
        assert answer.status_code == 200, answer.text
        assert received
        assert not read


async def test_what_is_told_of_one_product_is_bounded(client, put, monkeypatch):
    array = await put(np.eye(2))
    asked = []

    def watch(document):
        asked.append(len(document))
        return parse_params(document)

    monkeypatch.setattr(batch_items, "parse_params", watch)
    items = [{"a": array, "b": array, **{f"n{n}": 1 for n in range(50)}} for _ in range(3)]
    answer = await client.post("/v1/batch", json={"items": items, "results": "each"})
    for item in answer.json()["items"]:
        assert item["state"] == "failed"
        assert [entry["field"] for entry in item["error"]["errors"]] == ["n0", "n1", "n2", "n3"]
    assert max(asked) == 4, "the model has not looked at more"


class TestBadForms:
    @pytest.mark.parametrize(
        ("change", "status", "slug"),
        [
            (lambda body: body[2:], 400, "malformed-multipart"),
            (lambda body: body[:-8], 400, "invalid-npy"),
            (lambda body: body[: len(body) // 2], 400, "body-length"),
            (lambda body: body.replace(b'name="b"', b'name="e"'), 422, "parameter-invalid"),
            (lambda body: body.replace(b'name="b"', b'name="a"'), 422, "parameter-invalid"),
            (lambda body: body.replace(b"form-data", b"nothing"), 400, "malformed-multipart"),
            (lambda body: body.replace(b"\x93NUMPY", b"\x93NUMPI", 1), 400, "invalid-npy"),
            (lambda body: body.replace(b"'<c8'", b"'|O8'", 1), 422, "dtype-unsupported"),
            (lambda body: body.replace(b"(3, 4, 5)", b"(9, 4, 5)", 1), 400, "body-length"),
            (lambda body: body.replace(b"(3, 4, 5)", b"(2, 4, 5)", 1), 400, "invalid-npy"),
            (lambda body: body.replace(b"\r\n\r\n", b"\r\n" + b"x" * 5000, 1), 400, "malformed-multipart"),
        ],
    )
    async def test_broken_bodies(self, client, form, npy, random_array, problem, change, status, slug):
        content, headers = form([("a", npy(random_array((3, 4, 5)))), ("b", npy(random_array((3, 5, 2))))])
        problem(await client.post("/v1/batch", content=change(content), headers=headers), status, slug)
        assert await nothing_held(client)

    async def test_numbers_that_differ(self, sent, problem, random_array):
        answer = await sent({}, a=random_array((3, 4, 5)), b=[random_array((5, 2))] * 2)
        problem(answer, 422, "parameter-invalid")
        problem(await sent({}, a=random_array((3, 4, 5))), 422, "parameter-invalid")
        problem(await sent({"op": "gemm_reduce"}, a=np.eye(2), b=np.eye(2), c=np.eye(2)), 422, "parameter-invalid")
        problem(await sent({}, a=np.asfortranarray(random_array((3, 4, 5))), b=np.eye(5)), 422, "parameter-invalid")

    async def test_parts_have_a_number(self, client, form, problem):
        """Also empty ones, each of which would be looked at."""
        content, headers = form([("a", b"")] * 30_002)
        document = problem(await client.post("/v1/batch", content=content, headers=headers), 413, "too-large")
        assert "parts" in document["detail"]
        assert await nothing_held(client)

    async def test_claims_cost_nothing(self, client, form, npy_header, problem):
        head = npy_header("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 0, 4), }")
        content, headers = form([("a", head), ("b", head)])
        problem(await client.post("/v1/batch", content=content, headers=headers), 413, "too-large")


@pytest.mark.parametrize("fields", [{"max_batch_items": 3}, {"max_batch_bytes": 1500}])
class TestLimits:
    @pytest.fixture
    def settings(self, make_settings, fields):
        return make_settings(**fields)

    async def test_too_many_or_too_much(self, sent, stored, put, problem, random_array, fields):
        a = random_array((4, 4, 4), "complex128")
        problem(await sent({}, a=a, b=a), 413, "too-large")
        a_id = await put(a[0])
        answer = await stored([{"a": a_id, "b": a_id}] * (4 if "max_batch_items" in fields else 10), results="each")
        problem(answer, 413, "too-large")


async def test_deadline_and_hangup(sent, spy, problem, client, core, eventually):
    spy.hold = True
    eye = np.stack([np.eye(3)] * 2)
    problem(await sent({}, a=eye, b=eye, path="/v1/batch?timeout_s=0.2"), 504, "timeout")
    request = asyncio.ensure_future(sent({}, a=eye, b=eye))
    await eventually(lambda: core.scheduler.queued == 1)
    request.cancel()
    await asyncio.wait([request])
    spy.release()
    async with asyncio.timeout(60):
        while not await nothing_held(client):  # noqa: ASYNC110 (the worker's answer)
            await asyncio.sleep(0.01)


async def test_who_is_cancelled_twice_while_operands_are_swapped_leaves_their_place_to_the_thread(
    sent, core, monkeypatch, eventually
):
    """No other array gets it before the thread is through."""
    begun, gate, taken, done = threading.Event(), threading.Event(), [], threading.Event()
    align, reserve = batch_bodies._align, batch_bodies.reserve

    def held(view, found):
        begun.set()
        gate.wait(60)
        try:
            return align(view, found)
        finally:
            done.set()

    def watched(store, nbytes, **fields):
        taken.append((nbytes, reserve(store, nbytes, **fields)))
        return taken[-1][1]

    monkeypatch.setattr(batch_bodies, "_align", held)
    monkeypatch.setattr(batch_bodies, "reserve", watched)
    wide = np.ones((2, 256, 256), ">f8")
    request = asyncio.ensure_future(sent({}, a=wide, b=wide))
    await eventually(begun.is_set)
    ((nbytes, upload),) = taken
    extent = upload.extent
    request.cancel()
    await asyncio.sleep(0)
    request.cancel()
    try:
        await asyncio.wait([request])
        del request  # whose traceback refers to the body
        gc.collect()
        assert core.store.scratch_bytes == 0
        others = [reserve(core.store, nbytes, largest=nbytes, owner="") for _ in range(2)]
        assert extent not in [other.extent for other in others]
    finally:
        gate.set()
    await eventually(done.is_set)
    await eventually(lambda: extent.quiescent)
    for other in others:
        other.abort()


@pytest.fixture
def eventually():
    async def wait(condition, within_s=60.0):
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110 (there is no event for it)
                await asyncio.sleep(0.005)

    return wait


async def test_a_batch_is_one_job_that_costs_what_its_products_do(client, sent, random_array):
    a = random_array((50, 8, 8))
    await sent({}, a=a, b=a)
    text = (await client.get("/metrics")).text
    assert 'gemmserve_jobs_total{algorithm="numpy",op="gemm",state="succeeded"} 1.0' in text
    flops = next(line for line in text.splitlines() if line.startswith('gemmserve_flops_total{op="gemm"}'))
    assert float(flops.split()[1]) == 50 * 8 * 8**3
    assert "gemmserve_batch_size_sum 50.0" in text


async def test_a_batch_of_one_product_goes_to_a_worker_with_others(sent, spy, core, eventually):
    spy.hold = True
    eye = np.eye(4, dtype="f4")
    paths = ["/v1/gemm", "/v1/batch", "/v1/gemm", "/v1/batch", "/v1/gemm"]
    requests = [asyncio.ensure_future(sent({}, path=path, a=eye, b=eye)) for path in paths]
    await eventually(lambda: core.scheduler.queued + core.scheduler.running == len(paths))
    spy.release()
    async with asyncio.timeout(60):
        assert [answer.status_code for answer in await asyncio.gather(*requests)] == [200] * len(paths)
    together = [message.tasks for message in spy.sent if len(message.tasks) > 1]
    extents = {len(work.extents) for works in together for work in works}
    assert extents == {2, 3}, "a batch's operands lie in one extent"


@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_results_of_which_one_cannot_be_stored_are_none(stored, put, core, monkeypatch, random_array, failing):
    a = await put(random_array((4, 4)))
    used = core.store.used_bytes
    secured = []

    async def secure(upload):
        secured.append(upload)
        if len(secured) - 1 == failing:
            raise StoreFull("the disk is full")
        await asyncio.sleep(0)  # the others are under way when that one fails

    monkeypatch.setattr(core.store, "secure", secure)
    answer = await stored([{"a": a, "b": a}] * 3, results="each")
    assert (answer.status_code, len(secured)) == (507, 3), answer.text
    for _ in range(2):  # what was under way has come to its end
        await core.database.write(lambda _: None)
    assert (core.store.count, core.store.used_bytes) == (1, used)
    free = [extent.name for extent in core.store._files._free.values()]
    assert len(free) == len(set(free))


async def test_others_have_their_turns_while_a_batch_is_prepared(client, form, npy, monkeypatch):
    asked = 0
    pause = yielding.Turns.pause

    async def count(self):
        nonlocal asked
        asked += 1
        await pause(self)

    monkeypatch.setattr(yielding.Turns, "pause", count)
    a = b"".join(npy(np.ones((1 + i, 2), "f4")) for i in range(100))
    b = b"".join(npy(np.ones((2, 1), "f4")) for _ in range(100))
    content, headers = form([("a", a), ("b", b)])
    assert (await client.post("/v1/batch", content=content, headers=headers)).status_code == 200
    assert asked >= 5 * 100  # two operands, the kinds, their plans, the message


@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize("times", [1, 2])
async def test_who_is_cancelled_while_results_become_arrays_leaves_none(
    client, stored, npy, core, monkeypatch, eventually, times, after
):
    """Neither those that are arrays by then, nor those whose rows are on their way."""
    answer = await client.post(
        "/v1/arrays", content=npy(np.ones((2, 2), "f4")), headers={"content-type": "application/x-npy"}
    )
    operand = answer.json()["id"]
    used = core.store.used_bytes
    commit, ended, delete = Upload.commit, [], core.store.delete

    async def slow(self):
        info = await commit(self)
        ended.append(self)
        if len(ended) == after:
            request.cancel()
        return info

    async def late(array_id, **fields):
        if times == 2:
            request.cancel()
        await asyncio.sleep(0)
        await delete(array_id, **fields)

    monkeypatch.setattr(Upload, "commit", slow)
    monkeypatch.setattr(core.store, "delete", late)
    request = asyncio.ensure_future(stored([{"a": operand, "b": operand}] * 3, results="each"))
    await asyncio.wait([request])
    assert request.cancelled()
    await eventually(lambda: core.store.count == 1)
    await eventually(lambda: core.store.used_bytes == used)
    assert len(ended) >= after


async def test_others_have_their_turns_while_many_results_become_arrays(client, stored, npy, monkeypatch):
    """However many there are, few are begun in one round of the event loop."""
    answer = await client.post(
        "/v1/arrays", content=npy(np.ones((2, 2), "f4")), headers={"content-type": "application/x-npy"}
    )
    operand = answer.json()["id"]
    loop, rounds, begun = asyncio.get_running_loop(), 0, Counter()
    commit = Upload.commit

    def turn():
        nonlocal rounds
        rounds += 1
        loop.call_soon(turn)

    async def counted(self):
        begun[rounds] += 1
        return await commit(self)

    monkeypatch.setattr(Upload, "commit", counted)
    for span in ("_SPAN_S", "_BRIEF_S"):
        monkeypatch.setattr(yielding, span, 0.0)
    turn()
    answer = await stored([{"a": operand, "b": operand}] * 300, results="each")
    assert answer.status_code == 200
    assert begun.total() == 300
    assert max(begun.values()) <= 64
    assert rounds >= 3 * 300  # operands are held, results given space, each its place
