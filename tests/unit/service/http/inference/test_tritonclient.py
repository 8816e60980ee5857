"""An unmodified tritonclient: its own example flow, synchronous, asynchronous, with shared memory, compressed."""

from __future__ import annotations

import contextlib
import uuid

import numpy as np
import pytest

http = pytest.importorskip("tritonclient.http", reason="tritonclient is not installed")
aio = pytest.importorskip("tritonclient.http.aio")
shm = pytest.importorskip("tritonclient.utils.shared_memory")
utils = pytest.importorskip("tritonclient.utils")

RNG = np.random.default_rng(7)


@pytest.fixture
def address(live):
    return live.url.removeprefix("http://")


@pytest.fixture
def triton(address):
    with http.InferenceServerClient(address, concurrency=4) as client:
        yield client


@pytest.fixture
def region(triton):
    """region(nbytes) -> name and handle of registered shared memory; destroyed with the test."""
    with contextlib.ExitStack() as stack:

        def make(nbytes):
            name = f"gemmserve-test-{uuid.uuid4().hex}"
            handle = shm.create_shared_memory_region(name, f"/{name}", nbytes)
            stack.callback(shm.destroy_shared_memory_region, handle)
            triton.register_system_shared_memory(name, f"/{name}", nbytes)
            return name, handle

        yield make


def matrices(dtype="float32", m=5, k=7, n=3):
    return RNG.standard_normal((m, k)).astype(dtype), RNG.standard_normal((k, n)).astype(dtype)


def tensor(name, array, *, binary=True, module=http):
    made = module.InferInput(name, list(array.shape), utils.np_to_triton_dtype(array.dtype))
    return made.set_data_from_numpy(array, binary_data=binary)


def pairs(array):
    """A complex array as tensors of the protocol have it."""
    return array.view(array.real.dtype).reshape(*array.shape, 2)


def test_health_and_metadata(triton):
    assert triton.is_server_live()
    assert triton.is_server_ready()
    for model in ("gemm", "gemm_reduce"):
        assert triton.is_model_ready(model)
        assert triton.is_model_ready(model, "1")
        assert not triton.is_model_ready(model, "2")
        assert triton.get_model_config(model)["input"][0]["data_type"] == "TYPE_FP32"
    assert not triton.is_model_ready("simple")
    assert "binary_tensor_data" in triton.get_server_metadata()["extensions"]
    metadata = triton.get_model_metadata("gemm", "1")
    assert [each["name"] for each in metadata["inputs"]] == ["a", "b", "c"]
    assert "trailing dimension of 2" in metadata["parameters"]["complex"]
    assert {each["name"] for each in triton.get_model_repository_index()} == {"gemm", "gemm_reduce"}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_infer(triton, dtype, binary):
    a, b = matrices(dtype)
    outputs = [http.InferRequestedOutput("d", binary_data=binary)]
    inputs = [tensor("a", a, binary=binary), tensor("b", b, binary=binary)]
    result = triton.infer("gemm", inputs, outputs=outputs, request_id="seven", parameters={"alpha": -2})
    d = result.as_numpy("d")
    assert d.dtype == dtype
    np.testing.assert_allclose(d, -2 * (a.astype("float64") @ b), rtol=0, atol={"float16": 0.1}.get(dtype, 1e-4))
    assert result.get_response()["id"] == "seven"
    assert result.get_response()["model_version"] == "1"


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_operands_are_pairs(triton, dtype):
    a = (RNG.standard_normal((4, 6)) + 1j * RNG.standard_normal((4, 6))).astype(dtype)
    inputs = [tensor("a", pairs(a)), tensor("b", pairs(a))]
    result = triton.infer("gemm", inputs, parameters={"complex": True, "trans_b": "C", "alpha": [0, 1]})
    d = result.as_numpy("d")
    assert d.shape == (4, 4, 2)
    np.testing.assert_allclose(d.view(dtype)[..., 0], 1j * (a @ a.conj().T), rtol=0, atol=1e-4)
    reduced = triton.infer(
        "gemm_reduce", inputs, parameters={"complex": True, "trans_b": "T", "reduce": ["sum", "sumsq"], "axis": "m"}
    )
    assert reduced.as_numpy("sum").shape == (4, 2)
    np.testing.assert_allclose(reduced.as_numpy("sumsq"), (abs(a @ a.T) ** 2).sum(0), rtol=1e-3)


def test_beta_and_c_and_reductions(triton):
    a, b = matrices()
    c = RNG.standard_normal((5, 3)).astype("float32")
    result = triton.infer("gemm", [tensor("c", c), tensor("a", a), tensor("b", b)], parameters={"beta": 0.5})
    np.testing.assert_allclose(result.as_numpy("d"), a @ b + 0.5 * c, rtol=0, atol=1e-4)
    outputs = [http.InferRequestedOutput("argmax"), http.InferRequestedOutput("max", binary_data=False)]
    result = triton.infer(
        "gemm_reduce",
        [tensor("a", a), tensor("b", b, binary=False)],
        outputs=outputs,
        parameters={"reduce": ["max", "argmax"], "axis": "m"},
    )
    assert result.as_numpy("argmax").dtype == np.int64
    np.testing.assert_array_equal(result.as_numpy("argmax"), (a @ b).argmax(0))
    np.testing.assert_allclose(result.as_numpy("max"), (a @ b).max(0), rtol=0, atol=1e-4)


def test_async_infer(triton):
    cases = [matrices(m=m) for m in range(1, 9)]
    asked = [
        triton.async_infer("gemm", [tensor("a", a), tensor("b", b)], priority=1, timeout=60_000_000) for a, b in cases
    ]
    for (a, b), each in zip(cases, asked, strict=True):
        np.testing.assert_allclose(each.get_result().as_numpy("d"), a @ b, rtol=0, atol=1e-4)


async def test_aio(address):
    a, b = matrices()
    async with aio.InferenceServerClient(address) as client:
        assert await client.is_server_ready()
        inputs = [tensor("a", a, module=aio), tensor("b", b, module=aio)]
        result = await client.infer("gemm", inputs)
        np.testing.assert_allclose(result.as_numpy("d"), a @ b, rtol=0, atol=1e-4)
        statistics = await client.get_inference_statistics("gemm")
        assert statistics["model_stats"][0]["inference_count"] == 1
        with pytest.raises(utils.InferenceServerException, match="there are gemm and gemm_reduce"):
            await client.infer("simple", inputs)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_compressed_both_ways(triton, coding):
    a, b = np.ones((300, 500), "float32"), np.ones((500, 20), "float32")
    result = triton.infer(
        "gemm",
        [tensor("a", a), tensor("b", b)],
        request_compression_algorithm=coding,
        response_compression_algorithm=coding,
    )
    np.testing.assert_array_equal(result.as_numpy("d"), a @ b)


def test_shared_memory(triton, region):
    a, b = matrices()
    expected = a @ b
    inputs, (given, handle) = [], region(a.nbytes + b.nbytes)
    shm.set_shared_memory_region(handle, [a, b])
    for name, array, offset in (("a", a, 0), ("b", b, a.nbytes)):
        inputs.append(http.InferInput(name, list(array.shape), "FP32"))
        inputs[-1].set_shared_memory(given, array.nbytes, offset)
    made, result_handle = region(2 * expected.nbytes)
    output = http.InferRequestedOutput("d")
    output.set_shared_memory(made, expected.nbytes, expected.nbytes)
    result = triton.infer("gemm", inputs, outputs=[output])
    assert result.get_output("d") == {"name": "d", "datatype": "FP32", "shape": [5, 3]}
    found = shm.get_contents_as_numpy(result_handle, np.float32, [2, *expected.shape])
    np.testing.assert_allclose(found[1], expected, rtol=0, atol=1e-4)
    assert not found[0].any()
    assert {each["name"] for each in triton.get_system_shared_memory_status()} == {given, made}
    assert triton.get_system_shared_memory_status(made)[0]["byte_size"] == 2 * expected.nbytes
    triton.unregister_system_shared_memory(made)
    with pytest.raises(utils.InferenceServerException, match="is registered"):
        triton.infer("gemm", inputs, outputs=[output])
    triton.unregister_system_shared_memory()
    assert triton.get_system_shared_memory_status() == []


def test_statistics_count(triton):
    a, b = matrices()
    for _ in range(3):
        triton.infer("gemm", [tensor("a", a), tensor("b", b)])
    with pytest.raises(utils.InferenceServerException) as refused:
        triton.infer("gemm", [tensor("a", a), tensor("b", a)])
    assert refused.value.status() == "422"
    (found,) = triton.get_inference_statistics("gemm")["model_stats"]
    assert (found["inference_count"], found["execution_count"]) == (3, 3)
    phases = found["inference_stats"]
    assert phases["success"]["count"] == 3
    assert phases["fail"]["count"] == 1
    inner = sum(phases[name]["ns"] for name in ("queue", "compute_input", "compute_infer", "compute_output"))
    assert 0 < inner <= phases["success"]["ns"]
    assert found["last_inference"] > 1.6e12
    every = triton.get_inference_statistics()["model_stats"]
    assert {each["name"]: each["inference_count"] for each in every} == {"gemm": 3, "gemm_reduce": 0}


def test_what_is_not_there_is_said_in_the_protocols_form(triton):
    assert triton.get_cuda_shared_memory_status() == []
    triton.unregister_cuda_shared_memory()
    with pytest.raises(utils.InferenceServerException, match="CUDA shared memory is not taken"):
        triton.register_cuda_shared_memory("x", b"handle", 0, 16)
    for call in (lambda: triton.load_model("gemm"), triton.get_log_settings, triton.get_trace_settings):
        with pytest.raises(utils.InferenceServerException, match="there is nothing at") as refused:
            call()
        assert refused.value.status() == "404"
    a, b = matrices()
    with pytest.raises(utils.InferenceServerException, match="sequence"):
        triton.infer("gemm", [tensor("a", a), tensor("b", b)], sequence_id=4, sequence_start=True)


def test_with_keys(serve, make_settings, tmp_path):
    from gemmserve_service.tenancy.keyring import create_key

    _, text = create_key(tmp_path / "data", "alice")
    live = serve(data_dir=tmp_path / "data")
    a, b = matrices()
    with http.InferenceServerClient(live.url.removeprefix("http://")) as client:
        assert client.is_server_ready()
        inputs = [tensor("a", a), tensor("b", b)]
        with pytest.raises(utils.InferenceServerException, match="wants an API key"):
            client.infer("gemm", inputs)
        result = client.infer("gemm", inputs, headers={"Authorization": f"Bearer {text}"})
        np.testing.assert_allclose(result.as_numpy("d"), a @ b, rtol=0, atol=1e-4)
