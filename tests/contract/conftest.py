"""One suite for every backend: the real server on a device, spoken to over HTTP alone."""

from __future__ import annotations

import io
import json
from pathlib import Path

import httpx
import numpy as np
import pytest

BACKENDS = ["cpu", "joined", pytest.param("gpu", marks=pytest.mark.gpu)]
CHANNELS = ["job", "one-shot"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Arithmetic has one outcome: `make test` runs none of these again."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.flaky(reruns=0))


@pytest.fixture(scope="session", params=BACKENDS)
def server(request):
    """The service on one device; `joined`: a processor's that has joined over TCP."""
    from live_server import LiveServer

    device = request.param
    if device == "joined":
        with LiveServer(joins=["node"]) as server:
            yield server
        return
    if device == "gpu":
        import cupy

        device = "rocm:0" if cupy.cuda.runtime.is_hip else "cuda:0"
    with LiveServer("--device", device) as server:
        yield server


@pytest.fixture(scope="session")
def http(server):
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


@pytest.fixture
def npy():
    def encode(array):
        file = io.BytesIO()
        np.save(file, array)
        return file.getvalue()

    return encode


@pytest.fixture
def put(http, npy):
    """Stores an array, returns its id."""

    def upload(array):
        answer = http.post("/v1/arrays", content=npy(array), headers={"Content-Type": "application/x-npy"})
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    return upload


def _load(data):
    return np.load(io.BytesIO(data), allow_pickle=False)


@pytest.fixture(params=CHANNELS)
def compute(request, http, put, npy):
    """`compute(op, arrays, **params)` -> results by name, over stored arrays and a job or in one request."""

    def by_job(op, arrays, params):
        job = {"op": op, **params, **{name: put(array) for name, array in arrays.items()}}
        answer = http.post("/v1/jobs", json=job, headers={"Prefer": "wait=60"})
        assert answer.status_code == 200, answer.text
        info = answer.json()
        assert info["state"] == "succeeded", info
        assert info["algorithm"]
        return {name: _load(http.get(f"/v1/arrays/{id_}/data").content) for name, id_ in info["result"].items()}

    def by_one_shot(op, arrays, params):
        files = {"params": (None, json.dumps(params).encode())}
        files |= {name: (f"{name}.npy", npy(array)) for name, array in arrays.items()}
        answer = http.post("/v1/gemm" if op == "gemm" else "/v1/gemm-reduce", files=files)
        assert answer.status_code == 200, answer.text
        assert answer.headers["gemm-algorithm"]
        if answer.headers["content-type"] == "application/x-npz":
            return dict(_load(answer.content))
        name = "d" if op == "gemm" else np.atleast_1d(params.get("reduce", "sum"))[0]
        return {str(name): _load(answer.content)}

    call = by_job if request.param == "job" else by_one_shot
    return lambda op, arrays, **params: call(op, arrays, params)


@pytest.fixture
def random_array():
    def make(shape, dtype="complex64", seed=0):
        generator = np.random.default_rng((seed, *shape))
        real = generator.standard_normal(shape)
        if np.dtype(dtype).kind == "c":
            return (real + 1j * generator.standard_normal(shape)).astype(dtype)
        return real.astype(dtype)

    return make


@pytest.fixture
def close():
    """Checks a result against one in extended precision, within the error bound of a product of `k` terms.

    |D - ref| <= gamma * |A| |B| elementwise (Higham, Accuracy and Stability of Numerical Algorithms, section 3.5), with
    gamma = (k + 4) u; complex arithmetic adds a factor of 2 sqrt(2), rounding the result one more u of its type.
    """

    def check(actual, expected, magnitude, k, dtype):
        real = np.dtype(dtype).type(0).real.dtype
        wide = np.float32 if real == np.float16 else real
        gamma = 4 * (k + 4) * np.finfo(wide).eps
        bound = gamma * magnitude + np.finfo(real).eps * np.abs(expected) + np.finfo(real).tiny
        error = np.abs(actual.astype(expected.dtype) - expected)
        assert actual.shape == expected.shape
        assert np.all(error <= bound), f"error {error.max()}, at most {np.max(error / bound)} times the bound"

    return check


@pytest.fixture
def problem():
    def check(answer, status, slug):
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json"), answer.text
        document = answer.json()
        assert document["type"] == f"/problems/{slug}"
        return document

    return check
