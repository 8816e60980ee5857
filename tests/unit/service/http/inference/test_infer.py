"""Inferences as hostile and careless clients send them: lengths, shapes, datatypes, places, codings, limits."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib

import numpy as np
import pytest

from gemmserve_service.http.inference.infer import HEADER_LENGTH
from gemmserve_service.http.inference.tensors import MAX_JSON
from gemmserve_service.tenancy.api_keys import Quota

A = np.arange(6, dtype="<f4").reshape(2, 3)
B = np.ones((3, 2), "<f4")
BINARY = {"parameters": {"binary_data_output": True}}


def entry(name, array=None, *, inline=False, **fields):
    """An input of the JSON; with its elements in it, or behind it."""
    shape = [] if array is None else list(array.shape)
    made = {"name": name, "shape": shape, "datatype": "FP32"}
    if inline:
        made["data"] = array.ravel().tolist()
    elif array is not None:
        made["parameters"] = {"binary_data_size": array.nbytes}
    return made | fields


def request(*inputs, **fields):
    return {"inputs": list(inputs) or [entry("a", A), entry("b", B)], **fields}


def body_of(document, *arrays):
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return text + b"".join(array.tobytes() for array in arrays), {HEADER_LENGTH: str(len(text))}


@pytest.fixture
def post(client):
    async def send(document=None, *arrays, model="gemm", headers=None, content=None):
        body, fields = body_of(request() if document is None else document, *(arrays or (A, B)))
        body = body if content is None else content
        return await client.post(f"/v2/models/{model}/infer", content=body, headers={**fields, **(headers or {})})

    return send


@pytest.fixture
def refused(post, footprint):
    """refused(status, text, ...) -> checks that a request is refused in the protocol's form, and leaves nothing."""

    async def check(status, text, *arguments, **fields):
        before = footprint()
        answer = await post(*arguments, **fields)
        assert answer.status_code == (status or answer.status_code), answer.text[:300]
        assert answer.headers["content-type"] == "application/json"
        document = answer.json()
        assert list(document) == ["error"]
        assert text in document["error"], document["error"]
        assert footprint() == before
        return answer

    return check


async def test_binary_answers_say_where_the_json_ends(post, footprint):
    answer = await post(request(parameters={"binary_data_output": True}))
    assert answer.status_code == 200
    length = int(answer.headers[HEADER_LENGTH])
    document = json.loads(answer.content[:length])
    assert document["outputs"] == [
        {"name": "d", "datatype": "FP32", "shape": [2, 2], "parameters": {"binary_data_size": 16}}
    ]
    np.testing.assert_array_equal(np.frombuffer(answer.content[length:], "<f4").reshape(2, 2), A @ B)
    assert "id" not in document
    assert answer.headers["gemm-algorithm"]


async def test_json_alone_needs_no_length(client):
    document = request(entry("a", A, inline=True), entry("b", B, parameters={}, data=B.tolist()), id="x")
    answer = await client.post("/v2/models/gemm/versions/1/infer", json=document)
    assert answer.headers["content-type"] == "application/json"
    assert HEADER_LENGTH not in answer.headers
    assert answer.json()["outputs"][0]["data"] == (A @ B).ravel().tolist()
    assert answer.json()["id"] == "x"


async def test_nan_and_infinities_go_both_ways(client):
    a = np.array([[np.nan, 1], [np.inf, 1]], "<f4")
    document = json.dumps(request(entry("a", a, inline=True), entry("b", np.eye(2, dtype="f4"), inline=True)))
    assert "NaN" in document
    answer = await client.post("/v2/models/gemm/infer", content=document)
    assert answer.status_code == 200, answer.text
    data = json.loads(answer.text)["outputs"][0]["data"]
    np.testing.assert_array_equal(np.isnan(data), [True, True, False, True])
    assert data[2] == np.inf


async def test_empty_products(post):
    empty = np.zeros((2, 0), "<f4")
    answer = await post(request(entry("a", empty), entry("b", empty.T)), empty, empty)
    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"][0]["data"] == [0.0] * 4
    answer = await post(
        request(entry("a", empty.T), entry("b", empty), parameters={"binary_data_output": True}), empty, empty
    )
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.content)["outputs"][0]["shape"] == [0, 0]


async def test_batches_broadcast(post):
    a = np.arange(24, dtype="<f4").reshape(4, 2, 3)
    answer = await post(request(entry("a", a), entry("b", B)), a, B)
    np.testing.assert_array_equal(np.reshape(answer.json()["outputs"][0]["data"], (4, 2, 2)), a @ B)


class TestLengths:
    @pytest.mark.parametrize(
        "value", ["-1", "1e3", "0x10", "", "9" * 30, "٣"], ids=["negative", "float", "hex", "none", "huge", "arabic"]
    )
    async def test_of_the_json_is_a_number(self, refused, value):
        await refused(400, "is not a number", headers={HEADER_LENGTH: value.encode()})

    async def test_of_the_json_past_the_body(self, refused):
        await refused(400, "the body ends before", headers={HEADER_LENGTH: "100000"})

    async def test_of_the_json_past_what_is_taken(self, refused):
        await refused(413, "bytes of JSON", headers={HEADER_LENGTH: str(MAX_JSON + 1)})

    async def test_of_the_json_is_short(self, refused):
        await refused(400, "cannot be read", headers={HEADER_LENGTH: "20"})
        await refused(400, "cannot be read", headers={HEADER_LENGTH: "0"})

    async def test_of_the_json_is_missing(self, client):
        body, _ = body_of(request(), A, B)
        answer = await client.post("/v2/models/gemm/infer", content=body)
        assert answer.status_code == 400
        body, _ = body_of(request())
        answer = await client.post("/v2/models/gemm/infer", content=body)
        assert (answer.status_code, "0 are behind it" in answer.text) == (400, True)

    async def test_of_the_body_are_the_tensors(self, refused):
        await refused(400, "48 bytes of binary data, and 47", content=body_of(request(), A, B)[0][:-1])
        await refused(400, "48 bytes of binary data, and 49", content=body_of(request(), A, B)[0] + b"x")

    async def test_of_a_tensor_is_that_of_its_shape(self, refused):
        short = entry("a", A, parameters={"binary_data_size": 20})
        await refused(400, "has 24 bytes, not 20", request(short, entry("b", B)))

    async def test_is_needed(self, client):
        async def pieces():
            yield json.dumps(request(entry("a", A, inline=True), entry("b", B, inline=True))).encode()

        answer = await client.post("/v2/models/gemm/infer", content=pieces())
        assert (answer.status_code, list(answer.json())) == (411, ["error"])

    async def test_past_the_limit_is_refused_by_the_head(self, live):
        with live.connect() as connection:
            connection.sendall(
                b"POST /v2/models/gemm/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 999999999999999\r\n\r\n"
            )
            answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 413")
        assert b'{"error": ' in answer

    async def test_a_body_that_breaks_off_leaves_nothing(self, live):
        body, fields = body_of(request(), A, B)
        for cut in (10, int(fields[HEADER_LENGTH]) + 3, len(body) - 1):
            with live.connect() as connection:
                head = f"POST /v2/models/gemm/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
                connection.sendall(head.encode() + f"{HEADER_LENGTH}: {fields[HEADER_LENGTH]}\r\n\r\n".encode())
                connection.sendall(body[:cut])
        while live.tasks:  # noqa: ASYNC110 (another thread's)
            await asyncio.sleep(0.01)
        assert live.core.store.scratch_bytes == 0


class TestShapes:
    @pytest.mark.parametrize(
        "extent", [-1, 1.5, "3", True, None, [3], 1 << 63, 10**400], ids=lambda each: str(each)[:9]
    )
    async def test_extents_are_whole_numbers(self, refused, extent):
        await refused(422, "inputs.0.shape", request(entry("a", A, shape=[2, extent]), entry("b", B)))

    async def test_products_past_any_memory(self, refused):
        huge = [1 << 62, 1 << 62]
        await refused(400, "bytes, not 24", request(entry("a", A, shape=huge), entry("b", B)))
        size = 1 << 61
        claimed = entry("a", shape=[1 << 59, 1], parameters={"binary_data_size": size})
        await refused(400, f"tells of {size + 4} bytes", request(claimed, entry("b", B[:1, :1]), **BINARY), A, B)

    async def test_many_dimensions(self, refused):
        await refused(422, "shape", request(entry("a", A, shape=[1] * 33), entry("b", B)))
        await refused(422, "", request(entry("a", A, shape=[6]), entry("b", B)))

    async def test_that_do_not_fit_each_other(self, refused):
        await refused(422, "", request(entry("a", A), entry("b", A)), A, A)

    async def test_complex_ones_have_a_last_dimension_of_two(self, refused):
        await refused(422, "trailing dimension of 2", request(parameters={"complex": True}))


class TestTensors:
    @pytest.mark.parametrize(
        ("datatype", "text"),
        [("BF16", "can be sent as FP32"), ("BYTES", "not multiplied"), ("INT8", "not multiplied"), ("fp32", "FP32")],
    )
    async def test_datatypes_that_are_not_multiplied(self, refused, datatype, text):
        await refused(422, text, request(entry("a", A, datatype=datatype), entry("b", B)))

    async def test_complex_half_precision(self, refused):
        a = entry("a", A.reshape(3, 2), datatype="FP16")
        await refused(422, "complex tensors are FP32, FP64", request(a, entry("b", B), parameters={"complex": True}))

    @pytest.mark.parametrize(
        "data",
        ["123456", {"0": 1}, [1, 2, "3", 4, 5, 6], [[1, 2], [3]], [None] * 6, [1e39] * 6, [10**400] * 6, [[1, 2]] * 3],
        ids=["text", "object", "texts", "ragged", "nulls", "overflow", "integers", "nesting"],
    )
    async def test_data_are_numbers_of_that_shape(self, refused, data):
        answer = await refused(None, "", request(entry("a", shape=[2, 3], data=data), entry("b", B)), B)
        assert answer.status_code in {400, 422}

    async def test_data_are_as_many_as_the_shape_says(self, refused):
        await refused(422, "data is not 6 numbers", request(entry("a", shape=[2, 3], data=[1] * 5), entry("b", B)), B)

    async def test_data_are_in_one_place(self, refused):
        both = entry("a", A, inline=True) | {"parameters": {"binary_data_size": A.nbytes}}
        await refused(422, "one of data", request(both, entry("b", B)))
        await refused(422, "one of data", request(entry("a", A, parameters={}), entry("b", B)), B)

    async def test_ten_thousand_inputs(self, refused):
        await refused(413, "beside the data", request(*[entry(f"x{i}", A) for i in range(10_000)]))
        await refused(413, "beside the data", request(*[entry("a", shape=[1], data=[1])] * 10_000), B)
        await refused(422, "inputs", request(*[entry(f"x{i}", A) for i in range(40)]))

    async def test_unknown_missing_and_repeated_ones(self, refused):
        await refused(422, "no input is called 'e'", request(entry("e", A), entry("b", B)))
        await refused(422, "b missing", request(entry("a", A)), A)
        await refused(422, "a is given twice", request(entry("a", A), entry("a", A)), A, A)
        await refused(422, "no output is called 'sum'", request(outputs=[{"name": "sum"}]))
        await refused(422, "d is wanted twice", request(outputs=[{"name": "d"}] * 2))
        await refused(422, "classification", request(outputs=[{"name": "d", "parameters": {"classification": 3}}]))

    async def test_json_answers_are_bounded(self, refused):
        a, b = np.ones((1024, 1), "<f4"), np.ones((1, 1024), "<f4")
        await refused(413, "ask for binary_data", request(entry("a", a), entry("b", b)), a, b)


class TestParameters:
    @pytest.mark.parametrize(
        ("parameters", "text"),
        [
            ({"priority": 202}, "priority"),
            ({"priority": -1}, "priority"),
            ({"priority": True}, "priority: an integer"),
            ({"timeout": 1.5}, "timeout"),
            ({"timeout": 1 << 70}, "timeout"),
            ({"complex": 1}, "complex: true or false"),
            ({"order": "F"}, "order"),
            ({"sequence_id": 1}, "sequence_id"),
            ({"alpha": "2"}, "alpha"),
            ({"reduce": "sum"}, "reduce"),
            ({"compute": "magic"}, "compute"),
        ],
        ids=lambda each: str(each)[:24],
    )
    async def test_are_checked(self, refused, parameters, text):
        await refused(422, text, request(parameters=parameters))

    async def test_are_finite(self, refused):
        await refused(400, "NaN is not JSON", request(parameters={"alpha": float("nan")}))

    async def test_reach_the_scheduler(self, post, core, monkeypatch):
        tasks = []
        submit = core.scheduler.submit
        monkeypatch.setattr(core.scheduler, "submit", lambda task, **more: (tasks.append(task), submit(task, **more)))
        for priority in (0, 1, 101, 201):
            answer = await post(request(parameters={"priority": priority, "timeout": 2_500_000}))
            assert answer.status_code == 200, answer.text
        assert [task.priority for task in tasks] == [0, 100, 0, -100]
        assert {task.timeout_s for task in tasks} == {2.5}
        assert not any(task.durable for task in tasks)

    async def test_a_deadline_that_passes(self, post, core, spy):
        spy.hold = True
        answer = await post(request(parameters={"timeout": 50_000}))
        assert (answer.status_code, list(answer.json())) == (504, ["error"])
        spy.release()
        while core.store.scratch_bytes:  # noqa: ASYNC110 (a worker may be at it still)
            await asyncio.sleep(0.01)


class TestCodings:
    @pytest.mark.parametrize(("name", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
    async def test_are_read(self, post, refused, name, compress):
        body, _ = body_of(request(), A, B)
        answer = await post(content=compress(body), headers={"Content-Encoding": name})
        assert answer.status_code == 200, answer.text
        for wrong in (
            compress(body)[:-1],
            compress(body) + b"x",
            b"",
            body,
            compress(body[:-1]),
            compress(body + b"x"),
        ):
            await refused(400, "", content=wrong, headers={"Content-Encoding": name})

    async def test_json_alone(self, client):
        text = json.dumps(request(entry("a", A, inline=True), entry("b", B, inline=True))).encode()
        answer = await client.post(
            "/v2/models/gemm/infer", content=gzip.compress(text), headers={"Content-Encoding": "gzip"}
        )
        assert answer.status_code == 200, answer.text

    async def test_others_are_refused(self, refused):
        for name in ("br", "zstd", "gzip, gzip"):
            answer = await refused(415, "as gzip or deflate", headers={"Content-Encoding": name})
            assert answer.headers["accept-encoding"] == "gzip, deflate"

    async def test_bombs_are_refused_before_space_is_taken(self, refused, client, core):
        size = 1 << 29
        huge = [entry("a", shape=[size // 4, 1], parameters={"binary_data_size": size}), entry("b", B[:1, :1])]
        text = json.dumps(request(*huge, **BINARY)).encode()
        packed = gzip.compress(text + bytes(1 << 16))
        headers = {"Content-Encoding": "gzip", HEADER_LENGTH: str(len(text))}
        await refused(400, f"become the {len(text) + size + 4}", content=packed, headers=headers)
        bomb = gzip.compress(b" " * (64 << 20))
        answer = await client.post("/v2/models/gemm/infer", content=bomb, headers={"Content-Encoding": "gzip"})
        assert (answer.status_code, "bytes of JSON" in answer.json()["error"]) == (413, True)

    async def test_answers_are_coded_where_that_is_worth_it(self, client):
        a = np.zeros((64, 64), "<f4")
        body, fields = body_of(request(entry("a", a), entry("b", a), parameters={"binary_data_output": True}), a, a)
        plain = await client.post(
            "/v2/models/gemm/infer", content=body, headers={**fields, "Accept-Encoding": "identity"}
        )
        assert "content-encoding" not in plain.headers
        coded = await client.post(
            "/v2/models/gemm/infer", content=body, headers={**fields, "Accept-Encoding": "deflate"}
        )
        assert coded.headers["content-encoding"] == "deflate"
        assert coded.content == plain.content  # httpx decodes it
        random = np.random.default_rng(1).standard_normal((64, 64)).astype("<f4")
        body, fields = body_of(
            request(entry("a", random), entry("b", random), parameters={"binary_data_output": True}), random, random
        )
        answer = await client.post("/v2/models/gemm/infer", content=body, headers={**fields, "Accept-Encoding": "gzip"})
        assert "content-encoding" not in answer.headers


class TestEveryRequestIsOneOfTheService:
    async def test_keys_and_scopes(self, client, as_):
        reader, submitter = as_("reader", scopes=["read"]), as_("submitter", scopes=["submit"])
        body, fields = body_of(request(), A, B)
        for who, status in ((client, 401), (reader, 403), (submitter, 200)):
            answer = await who.post("/v2/models/gemm/infer", content=body, headers=fields)
            assert answer.status_code == status, answer.text
        for path in ("/v2", "/v2/health/live", "/v2/health/ready"):
            assert (await client.get(path)).status_code == 200
        for path in ("/v2/models/gemm", "/v2/models/stats", "/v2/systemsharedmemory/status"):
            assert (await client.get(path)).json()["error"].startswith("this server wants an API key")
            assert (await reader.get(path)).status_code == 200
        assert (await reader.post("/v2/repository/index")).status_code == 200
        answer = await reader.post("/v2/systemsharedmemory/unregister")
        assert (answer.status_code, answer.headers["www-authenticate"].partition(" ")[0]) == (403, "Bearer")

    async def test_quotas(self, as_):
        alice = as_("alice", quota=Quota(inflight_bytes=40))
        body, fields = body_of(request(), A, B)
        answer = await alice.post("/v2/models/gemm/infer", content=body, headers=fields)
        assert answer.status_code == 429
        assert answer.headers["retry-after"]

    async def test_digests_are_checked(self, refused):
        await refused(400, "Content-Digest", headers={"Content-Digest": "sha-256=:" + "A" * 43 + "=:"})

    async def test_other_paths_are_answered_in_its_form(self, client):
        for method, path, status in (
            ("GET", "/v2/nowhere", 404),
            ("GET", "/v2/models/gemm/infer", 405),
            ("POST", "/v2/models/gemm/versions/2/infer", 404),
            ("POST", "/v2/models/simple/infer?x=1", 404),
            ("GET", "/v2/models/gemm?a=1&a=2", 422),
        ):
            answer = await client.request(method, path)
            assert (answer.status_code, list(answer.json())) == (status, ["error"]), path
        assert "type" in (await client.get("/v2nowhere")).json()


class TestMemoryOfJson:
    INLINE = request(entry("a", A, inline=True), entry("b", B, inline=True))

    @pytest.fixture
    def memory(self, app):
        return app.state.json_memory

    def all_of_it(self, memory):
        """Whether nobody has any."""
        memory.take_read("", (512 << 20) // 10)()
        return True

    @pytest.mark.parametrize(
        ("fields", "status"),
        [
            ({}, 200),
            ({"parameters": {"binary_data_output": True}}, 200),
            ({"inputs": [entry("a", A, inline=True), entry("b", A, inline=True)]}, 422),
            ({"outputs": [{"name": "x"}]}, 422),
        ],
    )
    async def test_it_goes_back(self, client, memory, fields, status):
        answer = await client.post("/v2/models/gemm/infer", json=self.INLINE | fields)
        assert answer.status_code == status
        assert self.all_of_it(memory)

    async def test_there_is_an_end_of_it(self, client, post, memory):
        give_back = memory.take_read("", (512 << 20) // 10 - 30)  # room for less than a short text
        answer = await client.post("/v2/models/gemm/infer", json=self.INLINE)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert "as binary data" in answer.json()["error"]
        give_back()
        give_back = memory.take_read("", (512 << 20) // 10 - 1000)  # but not for what is written
        big = np.ones((64, 1), "<f4")
        names = entry("a", big), entry("b", big.T)
        assert (await post(request(*names), big, big)).status_code == 429
        assert (await post(request(*names, parameters={"binary_data_output": True}), big, big)).status_code == 200
        give_back()
        assert self.all_of_it(memory)
