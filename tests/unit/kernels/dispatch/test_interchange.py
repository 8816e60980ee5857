"""Arrays of other libraries: taken over without a copy, results given back in theirs, on the caller's stream."""

from __future__ import annotations

import contextlib
import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmserve_kernels import DtypeUnsupported, ParameterInvalid, gemm, gemm_reduce, prepare
from gemmserve_kernels.dispatch.interchange import interchanged


class Tensor:
    """An array of a library that shares memory by DLPack and by nothing else."""

    def __init__(self, data, *, device=(1, 0)):
        self.data = data
        self.device = device

    def __dlpack__(self, **options):
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device

    def __array__(self, *_, **__):
        raise AssertionError("copied to the host in silence")

    def __array_namespace__(self):
        return types.SimpleNamespace(from_dlpack=lambda array: Tensor(np.from_dlpack(array)))


class Raw:
    """A device array that tells of itself by __cuda_array_interface__ alone."""

    def __init__(self, stream):
        self.stream = stream

    @property
    def __cuda_array_interface__(self):
        return {"shape": (2,), "typestr": "<f4", "data": (4096, False), "version": 3, "stream": self.stream}


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def normal(rng, *shape):
    return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(np.complex64)


@given(
    m=st.integers(0, 5), n=st.integers(0, 5), k=st.integers(0, 5), trans=st.sampled_from("NTCR"), seed=st.integers(0, 9)
)
def test_results_are_those_of_numpy_arrays(m, n, k, trans, seed):
    rng = np.random.default_rng(seed)
    a, b = normal(rng, *((m, k) if trans in "NR" else (k, m))), normal(rng, k, n)
    found = gemm(Tensor(a), Tensor(b), trans_a=trans)
    assert isinstance(found, Tensor)
    np.testing.assert_array_equal(found.data, gemm(a, b, trans_a=trans))


def test_strided_tensors_are_read_where_they_lie(rng):
    a, b = normal(rng, 8, 6)[::-2, 1::2], normal(rng, 3, 4).T.copy().T
    np.testing.assert_array_equal(gemm(Tensor(a), Tensor(b)).data, gemm(a, b))


def test_out_is_written_in_place(rng):
    a, b, out = normal(rng, 4, 5), normal(rng, 5, 3), np.zeros((4, 3), np.complex64)
    tensor = Tensor(out)
    assert gemm(Tensor(a), Tensor(b), out=tensor) is tensor
    np.testing.assert_array_equal(out, gemm(a, b))


def test_numpy_arrays_may_stand_beside_tensors(rng):
    a, b = normal(rng, 4, 5), normal(rng, 5, 3)
    assert isinstance(gemm(a, Tensor(b)), Tensor)


def test_prepared_tensors(rng):
    a, b = normal(rng, 4, 5), normal(rng, 5, 3)
    np.testing.assert_array_equal(gemm(prepare(Tensor(a), "a"), Tensor(b)).data, gemm(a, b))


def test_reductions(rng):
    a, b = normal(rng, 4, 5), normal(rng, 5, 3)
    expected = gemm_reduce(a, b, reduce=["absmax", "sumsq"])
    target = np.zeros(3, np.float32)
    given_out = {"absmax": Tensor(target)}
    found = gemm_reduce(Tensor(a), Tensor(b), reduce=["absmax", "sumsq"], out=given_out)
    assert found["absmax"] is given_out["absmax"]
    np.testing.assert_array_equal(target, expected["absmax"])
    np.testing.assert_array_equal(found["sumsq"].data, expected["sumsq"])
    assert isinstance(gemm_reduce(Tensor(a), b), Tensor)


def test_a_reduction_into_arrays_of_another_library_is_refused_by_name(rng):
    with pytest.raises(ParameterInvalid, match="is on GPU 0") as refused:
        gemm_reduce(Tensor(normal(rng, 2, 2)), normal(rng, 2, 2), out={"sum": Tensor(np.zeros(2), device=(2, 0))})
    assert refused.value.parameter == "out['sum']"


@pytest.mark.parametrize("kind", [8, 4, 7])  # Metal, OpenCL, Vulkan
def test_other_memory_is_refused(rng, kind):
    with pytest.raises(ParameterInvalid, match="neither a host's nor") as refused:
        gemm(Tensor(normal(rng, 2, 2), device=(kind, 0)), normal(rng, 2, 2))
    assert refused.value.parameter == "a"


def test_elements_that_numpy_does_not_know(rng):
    class Brain(Tensor):
        dtype = "bfloat16"

        def __dlpack__(self, **_):
            raise BufferError("no such elements")

    with pytest.raises(DtypeUnsupported, match="bfloat16"):
        gemm(Brain(normal(rng, 2, 2)), normal(rng, 2, 2))


def test_a_result_that_may_not_be_written(rng):
    out = np.zeros((2, 2), np.complex64)
    out.flags.writeable = False
    with pytest.raises((ParameterInvalid, DtypeUnsupported)):
        gemm(Tensor(normal(rng, 2, 2)), normal(rng, 2, 2), out=Tensor(out))


class Recorder(types.ModuleType):
    """CuPy's part in the exchange, written down."""

    def __init__(self):
        super().__init__("cupy")
        self.entered = []
        attributes = types.SimpleNamespace(device=3)
        runtime = types.SimpleNamespace(pointerGetAttributes=lambda _: attributes)
        self.cuda = types.SimpleNamespace(Device=self.device, ExternalStream=self.stream, runtime=runtime)
        self.from_dlpack = lambda array: ("dlpack", array, tuple(self.entered))
        self.asarray = lambda array: ("interface", array, tuple(self.entered))

    @contextlib.contextmanager
    def device(self, number):
        self.entered.append(("device", number))
        yield
        self.entered.pop()

    @contextlib.contextmanager
    def stream(self, pointer, number):
        self.entered.append(("stream", pointer, number))
        yield
        self.entered.pop()


@pytest.fixture
def cupy(monkeypatch):
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "cupy", recorder)
    return recorder


def test_a_library_without_a_known_stream_is_ordered_by_dlpack(cupy, rng):
    tensor = Tensor(normal(rng, 2, 2), device=(2, 1))
    with interchanged({"a": tensor, "c": None}) as (arrays, _):
        assert arrays == {"a": ("dlpack", tensor, (("device", 1),)), "c": None}
    assert cupy.entered == []


def test_torch_works_on_its_current_stream(cupy, rng, monkeypatch):
    stream = types.SimpleNamespace(cuda_stream=77)
    torch = types.SimpleNamespace(
        cuda=types.SimpleNamespace(current_stream=lambda device: stream if device == 1 else None),
        is_grad_enabled=lambda: True,
    )
    monkeypatch.setitem(sys.modules, "torch", torch)

    class Ours(Tensor):
        requires_grad = False
        layout = "torch.strided"

        def detach(self):
            return self

        resolve_conj = resolve_neg = detach

    Ours.__module__ = "torch"
    tensor = Ours(normal(rng, 2, 2), device=(2, 1))
    with interchanged({"a": tensor}) as (arrays, _):
        assert arrays["a"] == ("dlpack", tensor, (("device", 1), ("stream", 77, 1)))


@pytest.mark.parametrize(("stream", "entered"), [(None, ()), (2, (("stream", 2, 3),)), (99, (("stream", 99, 3),))])
def test_the_stream_of_the_array_interface(cupy, stream, entered):
    raw = Raw(stream)
    with interchanged({"a": raw}) as (arrays, give):
        assert arrays["a"] == ("interface", raw, (("device", 3), *entered))
        assert give("result") == "result"
