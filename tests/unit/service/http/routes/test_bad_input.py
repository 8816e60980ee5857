"""Bad input: each a 4xx problem with a stable slug; no array, no bytes held, nothing sent to the executor."""

from __future__ import annotations

import json

import numpy as np
import pytest

NPY = "application/x-npy"
BARE = "application/octet-stream"
OBJECT = np.array([[{"a": 1}]], dtype=object)
STRUCTURED = np.zeros((2, 2), dtype=[("re", "f4"), ("im", "f4")])
HUGE = "{'descr': '<c8', 'fortran_order': False, 'shape': (1073741824, 1073741824), }"


@pytest.fixture(autouse=True)
async def harmless(client, spy, footprint):
    """Whatever a test does, the executor hears nothing of it and nothing is held afterwards."""
    yield
    assert spy.sent == []
    assert (await client.get("/v1/usage")).json()["store_bytes"] == footprint.baseline


@pytest.fixture
def footprint(footprint, core):
    footprint.baseline = core.store.used_bytes
    return footprint


def header(**fields):
    return repr({"descr": "<f4", "fortran_order": False, "shape": (2, 2)} | fields)


@pytest.fixture
def body(npy, npy_header):
    good = npy(np.ones((8, 8), "c8"))
    return {
        "empty": b"",
        "text": b"hello, world: this is no array",
        "header padded with NULs": npy_header(header() + "\0" * 20) + bytes(16),
        "zip": b"PK\x03\x04" + bytes(100),
        "magic only": b"\x93NUMPY",
        "version 9": b"\x93NUMPY\x09\x00" + good[8:],
        "truncated header": good[:40],
        "header claims 64 KiB and more": b"\x93NUMPY\x02\x00" + (1 << 30).to_bytes(4, "little") + bytes(64),
        "header is code": npy_header("__import__('os').system('true')") + bytes(16),
        "header is a call": npy_header("dict(descr='<f4', fortran_order=False, shape=(2,2))") + bytes(16),
        "header nests": npy_header("(" * 5000) + bytes(16),
        "header lacks a key": npy_header("{'descr': '<f4', 'shape': (2, 2)}") + bytes(16),
        "header has one more": npy_header(header(extra=1)) + bytes(16),
        "order is a number": npy_header(header(fortran_order=1)) + bytes(16),
        "truncated": good[:-1],
        "one byte more": good + b"x",
        "claims 2**60 elements": npy_header(HUGE) + bytes(64),
        "claims 1 GiB": npy_header(header(shape=(1 << 28,))) + bytes(64),
        "negative shape": npy_header(header(shape=(-2, 2))) + bytes(16),
        "overflowing shape": npy_header(header(shape=(1 << 62, 1 << 62))) + bytes(16),
        "zero times overflow": npy_header(header(shape=(0, 1 << 62, 1 << 62))),
        "shape of floats": npy_header(header(shape=(2.0, 2))) + bytes(16),
        "shape of booleans": npy_header(header(shape=(True, 2))) + bytes(16),
        "shape is a list": npy_header(header(shape="2,2")) + bytes(16),
        "too many dimensions": npy_header(header(shape=(1,) * 65)) + bytes(4),
        "pickled objects": npy(OBJECT),
        "object descr": npy_header(header(descr="|O")) + bytes(32),
        "structured": npy(STRUCTURED),
        "int64": npy(np.ones((2, 2), "i8")),
        "bool": npy(np.ones((2, 2), bool)),
        "text dtype": npy(np.array([["a", "b"]])),
        "longdouble": npy_header(header(descr="<f16")) + bytes(64),
        "datetime": npy_header(header(descr="<M8[s]")) + bytes(32),
    }


ARRAYS = [
    ("empty", 400, "invalid-npy"),
    ("text", 400, "invalid-npy"),
    ("zip", 400, "invalid-npy"),
    ("header padded with NULs", 400, "invalid-npy"),
    ("magic only", 400, "invalid-npy"),
    ("version 9", 400, "invalid-npy"),
    ("truncated header", 400, "invalid-npy"),
    ("header claims 64 KiB and more", 400, "invalid-npy"),
    ("header is code", 400, "invalid-npy"),
    ("header is a call", 400, "invalid-npy"),
    ("header nests", 400, "invalid-npy"),
    ("header lacks a key", 400, "invalid-npy"),
    ("header has one more", 400, "invalid-npy"),
    ("order is a number", 400, "invalid-npy"),
    ("truncated", 400, "body-length"),
    ("one byte more", 400, "body-length"),
    ("claims 2**60 elements", 400, "invalid-npy"),
    ("claims 1 GiB", 400, "body-length"),
    ("negative shape", 400, "invalid-npy"),
    ("overflowing shape", 400, "invalid-npy"),
    ("zero times overflow", 400, "invalid-npy"),
    ("shape of floats", 400, "invalid-npy"),
    ("shape of booleans", 400, "invalid-npy"),
    ("shape is a list", 400, "invalid-npy"),
    ("too many dimensions", 400, "invalid-npy"),
    ("pickled objects", 422, "dtype-unsupported"),
    ("object descr", 422, "dtype-unsupported"),
    ("structured", 422, "dtype-unsupported"),
    ("int64", 422, "dtype-unsupported"),
    ("bool", 422, "dtype-unsupported"),
    ("text dtype", 422, "dtype-unsupported"),
    ("longdouble", 422, "dtype-unsupported"),
    ("datetime", 422, "dtype-unsupported"),
]


@pytest.mark.parametrize(("name", "status", "slug"), ARRAYS, ids=[name for name, *_ in ARRAYS])
async def test_npy_upload(client, body, problem, footprint, name, status, slug):
    before = footprint()
    problem(await client.post("/v1/arrays", content=body[name], headers={"Content-Type": NPY}), status, slug)
    assert footprint() == before


@pytest.mark.parametrize(("name", "status", "slug"), ARRAYS, ids=[name for name, *_ in ARRAYS])
async def test_npy_part(client, body, form, problem, footprint, name, status, slug):
    before = footprint()
    content, headers = form([("a", body[name]), ("b", body["text"])])
    document = problem(await client.post("/v1/gemm", content=content, headers=headers), status, slug)
    assert "part a" in document["detail"]
    # A part's end is known only when it comes: what was kept of it is free, or ready for the next.
    assert footprint() - before <= 2 * len(content) + (1 << 16)


BARE_QUERIES = [
    ({}, 422, "parameter-invalid"),
    ({"dtype": "float32"}, 422, "parameter-invalid"),
    ({"shape": "2,2"}, 422, "parameter-invalid"),
    ({"dtype": "int64", "shape": "2,2"}, 422, "dtype-unsupported"),
    ({"dtype": "O", "shape": "2,2"}, 422, "dtype-unsupported"),
    ({"dtype": "float32", "shape": "-2,-2"}, 400, "invalid-npy"),
    ({"dtype": "float32", "shape": "2,x"}, 400, "invalid-npy"),
    ({"dtype": "float32", "shape": "4611686018427387904,4"}, 400, "invalid-npy"),
    ({"dtype": "float32", "shape": "1073741824,1073741824"}, 400, "invalid-npy"),
    ({"dtype": "float32", "shape": "32768,8192"}, 400, "body-length"),
    ({"dtype": "float32", "shape": "2,3"}, 400, "body-length"),
    ({"dtype": "float32", "shape": "1,1"}, 400, "body-length"),
    ({"dtype": "float32", "shape": "2,2", "order": "K"}, 422, "parameter-invalid"),
    ({"dtype": "float32", "shape": "2,2", "ttl_s": "-1"}, 422, "parameter-invalid"),
    ({"dtype": "float32", "shape": "2,2", "ttl_s": "nan"}, 422, "parameter-invalid"),
    ({"dtype": "float32", "shape": "2,2", "ttl": "60"}, 422, "parameter-invalid"),
]


@pytest.mark.parametrize(("query", "status", "slug"), BARE_QUERIES)
async def test_bare_upload(client, problem, footprint, query, status, slug):
    before = footprint()
    answer = await client.post("/v1/arrays", params=query, content=bytes(16), headers={"Content-Type": BARE})
    problem(answer, status, slug)
    assert footprint() == before


async def test_npy_says_its_own_shape(client, npy, problem):
    answer = await client.post(
        "/v1/arrays?dtype=float32", content=npy(np.ones((2, 2), "f4")), headers={"Content-Type": NPY}
    )
    problem(answer, 422, "parameter-invalid")


@pytest.mark.parametrize("path", ["/v1/arrays", "/v1/gemm"])
async def test_body_of_unknown_length(client, npy, problem, path):
    async def pieces():
        yield npy(np.ones((2, 2), "f4"))

    kind = NPY if path == "/v1/arrays" else "multipart/form-data; boundary=x"
    document = problem(
        await client.post(path, content=pieces(), headers={"Content-Type": kind}), 411, "length-required"
    )
    assert "Content-Length" in document["detail"]


@pytest.mark.parametrize("length", ["x", "-1", "1e3", "1, 1"])
async def test_content_length_is_a_number(client, npy, problem, length):
    headers = {"Content-Type": NPY, "Content-Length": length}
    problem(
        await client.post("/v1/arrays", content=npy(np.ones((2, 2), "f4")), headers=headers), 400, "invalid-request"
    )


@pytest.mark.parametrize("lie", [-8, 8])
async def test_body_differs_from_content_length(client, npy, problem, footprint, lie):
    before = footprint()
    data = npy(np.ones((64, 64), "f8"))
    headers = {"Content-Type": NPY, "Content-Length": str(len(data))}
    problem(
        await client.post("/v1/arrays", content=data[:lie] if lie < 0 else data + bytes(lie), headers=headers),
        400,
        "body-length",
    )
    assert footprint() - before <= (1 << 20) + (1 << 16)  # the file that small arrays share is free for the next one


@pytest.mark.parametrize("content_type", [None, "application/json", "application/x-www-form-urlencoded"])
async def test_content_type(client, npy, problem, content_type):
    headers = {} if content_type is None else {"Content-Type": content_type}
    document = problem(
        await client.post("/v1/arrays", content=npy(np.ones(2)), headers=headers), 415, "unsupported-media-type"
    )
    assert NPY in document["detail"]


async def test_digest_header(client, npy, problem):
    headers = {"Content-Type": NPY, "Content-Digest": "sha-256=nonsense"}
    problem(await client.post("/v1/arrays", content=npy(np.ones(2)), headers=headers), 400, "invalid-request")


@pytest.mark.parametrize("array_id", ["arr_01jd2w7m4h8k3n5p6q9r0s1t2v", "nonsense", "%00", "..%2f..%2fetc"])
async def test_unknown_array(client, problem, array_id):
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/data")):
        problem(await client.request(method, f"/v1/arrays/{array_id}{path}"), 404, "not-found")


class TestTooLarge:
    @pytest.fixture
    def settings(self, make_settings):
        return make_settings(max_array_bytes=4096)

    async def test_before_the_body_is_read(self, client, npy, problem, footprint):
        before = footprint()
        for content, headers, query in (
            (npy(np.ones(600)), {"Content-Type": NPY}, {}),
            (bytes(4800), {"Content-Type": BARE}, {"dtype": "float64", "shape": "600"}),
        ):
            problem(await client.post("/v1/arrays", params=query, content=content, headers=headers), 413, "too-large")
        assert footprint() == before

    async def test_part(self, client, npy, form, problem):
        content, headers = form([("a", npy(np.ones((30, 30)))), ("b", npy(np.ones((2, 2))))])
        problem(await client.post("/v1/gemm", content=content, headers=headers), 413, "too-large")


class TestStoreFull:
    @pytest.fixture
    def settings(self, make_settings):
        return make_settings(max_store_bytes=4096)

    async def test_unexpired_arrays_stay(self, client, put, npy, problem, footprint):
        kept = await put(np.ones(500))
        footprint.baseline = 4000
        problem(
            await client.post("/v1/arrays", content=npy(np.ones(500)), headers={"Content-Type": NPY}), 507, "store-full"
        )
        assert (await client.get(f"/v1/arrays/{kept}")).status_code == 200


F4, C8 = "float32", "complex64"
UNKNOWN = "arr_01jd2w7m4h8k3n5p6q9r0s1t2v"
JOBS = [
    ({"op": "gemm", "a": (2, 3), "b": (4, 5)}, 422, "shape-mismatch"),
    ({"op": "gemm", "a": (2, 3), "b": (3, 2), "trans_a": "T"}, 422, "shape-mismatch"),
    ({"op": "gemm", "a": (3,), "b": (3, 2)}, 422, "shape-mismatch"),
    ({"op": "gemm", "a": (2, 3), "b": (3,)}, 422, "shape-mismatch"),
    ({"op": "gemm", "a": (2, 2, 3), "b": (3, 3, 2)}, 422, "shape-mismatch"),
    ({"op": "gemm", "a": (2, 3), "b": (3, 2), "c": (5, 5), "beta": 1}, 422, "shape-mismatch"),
    ({"op": "gemm", "a": (2, 3), "b": (3, 2), "alpha": [0, 1]}, 422, "parameter-invalid"),
    ({"op": "gemm", "a": (2, 3), "b": (3, 2), "beta": 1}, 422, "parameter-invalid"),
    ({"op": "gemm", "a": (2, 3), "b": (3, 2), "alpha": "1"}, 422, "parameter-invalid"),
    ({"op": "gemm", "a": (2, 3), "b": (3, 2), "alpha": [1]}, 422, "parameter-invalid"),
    ({"op": "gemm", "a": (2, 3), "b": (3, 2), "alpha": 1e999}, 400, "malformed-json"),
    ({"op": "gemm", "a": (2, 3), "b": (3, 2), "alpha": float("nan")}, 400, "malformed-json"),
    ({"op": "gemm", "a": (2, 3), "b": (3, 2), "trans_b": "H"}, 422, "parameter-invalid"),
    ({"op": "gemm", "a": (2, 3), "b": (3, 2), "compute": "fp8"}, 422, "parameter-invalid"),
    ({"op": "gemm", "a": (2, 3), "b": (3, 2), "compute": "ozaki"}, 422, "compute-unsupported"),
    ({"op": "gemm", "a": (2, 3), "b": (3, 2), "layout": "planar"}, 422, "shape-mismatch"),
    ({"op": "gemm", "a": (2, 3), "b": (3, 2), "gamma": 1}, 422, "parameter-invalid"),
    ({"op": "gemm", "a": (2, 3), "b": (3, 2), "reduce": "sum"}, 422, "parameter-invalid"),
    ({"op": "gemm", "a": (2, 3), "b": (3, 2), "priority": "high"}, 422, "parameter-invalid"),
    ({"op": "gemm", "a": (2, 3), "b": (3, 2), "timeout_s": -1}, 422, "parameter-invalid"),
    ({"op": "gemm", "a": (2, 3), "b": (3, 2), "config": {"block_m": 0}}, 422, "parameter-invalid"),
    ({"op": "gemm", "a": (2, 3), "b": (3, 2), "config": {"warp": 1}}, 422, "parameter-invalid"),
    ({"op": "gemm", "a": (2, 3)}, 422, "parameter-invalid"),
    ({"op": "gemm", "a": "../etc", "b": (3, 2)}, 422, "parameter-invalid"),
    ({"op": "gemm", "a": UNKNOWN, "b": (3, 2)}, 404, "not-found"),
    ({"op": "solve", "a": (2, 3), "b": (3, 2)}, 422, "parameter-invalid"),
    ({"a": (2, 3), "b": (3, 2)}, 422, "parameter-invalid"),
    ({"op": "gemm_reduce", "a": (2, 3), "b": (3, 2), "c": (2, 2)}, 422, "parameter-invalid"),
    ({"op": "gemm_reduce", "a": (2, 3), "b": (3, 2), "reduce": "median"}, 422, "parameter-invalid"),
    ({"op": "gemm_reduce", "a": (2, 3), "b": (3, 2), "reduce": []}, 422, "parameter-invalid"),
    ({"op": "gemm_reduce", "a": (2, 3), "b": (3, 2), "axis": ["m", "n"]}, 422, "parameter-invalid"),
    ({"op": "gemm_reduce", "a": (2, 3), "b": (3, 2), "axis": "batch"}, 422, "parameter-invalid"),
    ({"op": "gemm_reduce", "a": (0, 3), "b": (3, 2), "reduce": "max"}, 422, "parameter-invalid"),
    ({"op": "gemm_reduce", "a": (2, 3, C8), "b": (3, 2), "reduce": "max"}, 422, "parameter-invalid"),
    ({"op": "gemm_reduce", "a": (2, 3, C8), "b": (3, 2), "reduce": ["sum", "min"]}, 422, "parameter-invalid"),
]


def split(job):
    """The operands' arrays and the rest of a job above."""
    arrays, fields = {}, {}
    for name, value in job.items():
        if isinstance(value, tuple):
            dtype = value[-1] if isinstance(value[-1], str) else F4
            arrays[name] = np.ones([n for n in value if isinstance(n, int)], dtype)
        else:
            fields[name] = value
    return arrays, fields


@pytest.mark.parametrize(("job", "status", "slug"), JOBS, ids=[json.dumps(job) for job, *_ in JOBS])
async def test_job(client, put, problem, footprint, job, status, slug):
    arrays, fields = split(job)
    ids = {name: await put(array) for name, array in arrays.items()}
    footprint.baseline = sum(array.nbytes for array in arrays.values())
    before = footprint()
    answer = await client.post(
        "/v1/jobs", content=json.dumps(fields | ids), headers={"Content-Type": "application/json"}
    )
    problem(answer, status, slug)
    assert footprint() == before
    assert (await client.get("/v1/jobs")).json()["items"] == []


# A request without a queue: the path says what the operation is, and there are no ids.
ONE_SHOTS = [
    entry
    for entry in JOBS
    if entry[0].get("op") in {"gemm", "gemm_reduce"}
    and not {"priority", "timeout_s"} & entry[0].keys()
    and not any(isinstance(entry[0].get(name), str) for name in ("a", "b"))
]


@pytest.mark.parametrize("params_first", [True, False])
@pytest.mark.parametrize(("job", "status", "slug"), ONE_SHOTS, ids=[json.dumps(job) for job, *_ in ONE_SHOTS])
async def test_one_shot(client, npy, form, problem, job, status, slug, params_first):
    arrays, fields = split(job)
    path = "/v1/gemm" if fields.pop("op") == "gemm" else "/v1/gemm-reduce"
    parts = [(name, npy(array)) for name, array in arrays.items()]
    params = ("params", json.dumps(fields).encode())
    content, headers = form([params, *parts] if params_first else [*parts, params])
    problem(await client.post(path, content=content, headers=headers), status, slug)


async def test_a_number_past_float64(client, put, problem, footprint):
    ids = {name: await put(np.ones((2, 2), "f4")) for name in ("a", "b")}
    footprint.baseline = 32
    text = json.dumps({"op": "gemm", **ids})[:-1] + ', "alpha": 1e999}'
    answer = await client.post("/v1/jobs", content=text, headers={"Content-Type": "application/json"})
    problem(answer, 422, "parameter-invalid")


@pytest.mark.parametrize(
    ("text", "status", "slug"),
    [
        (b"[]", 422, "parameter-invalid"),
        (b'"gemm"', 422, "parameter-invalid"),
        (b"null", 422, "parameter-invalid"),
        (b"", 400, "invalid-request"),
        (b"{", 400, "malformed-json"),
        (b'{"op": "gemm", "op": "gemm"}', 400, "malformed-json"),
        (b'{"op": "\\ud800"}', 422, "parameter-invalid"),
        (b'{"op": "gemm", "\\ud800": 1}', 422, "parameter-invalid"),
        (b"[" * 200_000, 400, "malformed-json"),
        (b" " * (2 << 20), 413, "too-large"),
    ],
)
async def test_json(client, problem, text, status, slug):
    answer = await client.post("/v1/jobs", content=text, headers={"Content-Type": "application/json"})
    problem(answer, status, slug)


async def test_job_must_be_json(client, problem):
    problem(await client.post("/v1/jobs", data={"op": "gemm"}), 415, "unsupported-media-type")


@pytest.mark.parametrize("job_id", ["job_01jd2w7m4h8k3n5p6q9r0s1t2v", "nonsense"])
async def test_unknown_job(client, problem, job_id):
    for method, path in (("GET", ""), ("GET", "?wait=1"), ("GET", "/events"), ("DELETE", "")):
        problem(await client.request(method, f"/v1/jobs/{job_id}{path}"), 404, "not-found")


@pytest.mark.parametrize(
    "path",
    ["/v1/jobs?wait=-1", "/v1/jobs?limit=0", "/v1/jobs?state=done", "/v1/arrays?limit=x", "/v1/arrays?limit=10000",
     "/v1/arrays?offset=3", "/v1/jobs/job_01jd2w7m4h8k3n5p6q9r0s1t2v?wait=nan"],
)  # fmt: skip
async def test_query(client, problem, path):
    document = problem(await client.get(path), 422, "parameter-invalid")
    assert document["errors"][0]["field"] in path
    assert document["parameter"] == document["errors"][0]["field"]


async def test_idempotency_key_length(client, problem):
    answer = await client.post("/v1/jobs", json={}, headers={"Idempotency-Key": "x" * 300})
    problem(answer, 422, "parameter-invalid")
