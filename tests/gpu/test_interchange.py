"""Device arrays of other libraries: by both interfaces, on the caller's stream, never on the host."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

from gemmserve_kernels import gemm, gemm_reduce  # noqa: E402 (cupy first)


class Tensor:
    """A device array that shares its memory by DLPack alone."""

    def __init__(self, data):
        self.data = data

    def __dlpack__(self, **options):
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.data.__dlpack_device__()

    def __array__(self, *_, **__):
        raise AssertionError("copied to the host in silence")

    def __array_namespace__(self):
        return self

    def from_dlpack(self, array):
        return Tensor(cupy.from_dlpack(array))


class Raw:
    """A device array of a library with the second interface alone, written on a stream of its own."""

    def __init__(self, data, stream):
        self.data = data
        self.stream = stream

    @property
    def __cuda_array_interface__(self):
        return self.data.__cuda_array_interface__ | {"stream": self.stream.ptr}


def operands(dtype="complex64", size=512):
    generator = cupy.random.default_rng(4)
    made = [generator.standard_normal((size, size), dtype=cupy.float32) for _ in range(4)]
    return (made[0] + 1j * made[1]).astype(dtype), (made[2] + 1j * made[3]).astype(dtype)


def test_dlpack():
    a, b = operands()
    found = gemm(Tensor(a), Tensor(b.T), trans_b="T")
    assert isinstance(found, Tensor)
    assert (found.data == gemm(a, b)).all()
    out = Tensor(cupy.empty_like(found.data))
    assert gemm(Tensor(a), Tensor(b), out=out) is out
    assert (out.data == found.data).all()
    assert (gemm_reduce(Tensor(a), b, reduce="absmax").data == gemm_reduce(a, b, reduce="absmax")).all()


def test_work_is_enqueued_on_the_stream_that_the_interface_names():
    a, b = operands(size=2048)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        late = cupy.zeros_like(a)
        for _ in range(50):  # the operand is ready only when all of these have run
            late += a
        late /= 50
    found = gemm(Raw(late, stream), Raw(b, stream))
    assert isinstance(found, cupy.ndarray)
    stream.synchronize()
    expected = gemm(a, b)
    assert float(abs(found - expected).max()) < 1e-3 * float(abs(expected).max())


def test_torch_on_its_own_stream():
    torch = pytest.importorskip("torch", reason="torch is not installed (extra torch)")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no device")
    from gemmserve_kernels import torch_ops

    a, b = (torch.randn(1024, 1024, dtype=torch.complex64, device="cuda") for _ in range(2))
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        late = sum((a for _ in range(20)), torch.zeros_like(a)) / 20
        found = gemm(late, b)
        torch.testing.assert_close(found, late @ b, rtol=1e-3, atol=1e-2)
        a.requires_grad_()
        torch_ops.gemm(a, b).abs().sum().backward()
    assert a.grad is not None
    assert a.grad.is_cuda
