"""Operators of PyTorch: results, gradients, what torch.compile asks of them."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from gemmserve_kernels import DtypeUnsupported, ParameterInvalid, ShapeMismatch, gemm

torch = pytest.importorskip("torch", reason="torch is not installed (extra torch)")

from gemmserve_kernels import torch_ops  # noqa: E402 (it imports torch)

TRANS = [("N", "N"), ("N", "C"), ("T", "R"), ("C", "N"), ("R", "T"), ("C", "C")]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(3)


def operand(rows, columns, trans, *batch, dtype=torch.complex128, grad=True):
    shape = (rows, columns) if trans in "NR" else (columns, rows)
    return torch.randn(*batch, *shape, dtype=dtype, requires_grad=grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
def test_the_operator_gives_what_gemm_gives(dtype):
    a, b = torch.randn(4, 5, dtype=dtype), torch.randn(5, 3, dtype=dtype)
    found = torch.ops.gemmserve.gemm(a, b, alpha=2)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.numpy(), gemm(a.numpy(), b.numpy(), alpha=2))


def test_tensors_come_back_as_tensors_in_shared_memory():
    a, b, out = torch.randn(4, 5), torch.randn(5, 3), torch.empty(4, 3)
    assert gemm(a, b, out=out) is out
    assert torch.equal(out, gemm(a, b))


def test_lazily_conjugated_and_transposed_tensors():
    a, b = torch.randn(4, 5, dtype=torch.complex64), torch.randn(4, 3, dtype=torch.complex64)
    assert a.mH.is_conj()
    np.testing.assert_allclose(gemm(a.mH, b).numpy(), (a.mH @ b).numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("trans_a", "trans_b"), TRANS)
def test_gradients(trans_a, trans_b):
    a, b = operand(3, 4, trans_a, 2), operand(4, 2, trans_b)  # b is broadcast over the batch
    c = torch.randn(3, 2, dtype=torch.complex128, requires_grad=True)
    options = {"alpha": 1.5 - 0.5j, "beta": 0.3j, "trans_a": trans_a, "trans_b": trans_b}
    assert torch.autograd.gradcheck(lambda *operands: torch_ops.gemm(*operands, **options), (a, b, c))


def test_c_is_added_unless_beta_says_otherwise():
    a, b = operand(3, 4, "N"), operand(4, 2, "N")
    c = torch.randn(3, 2, dtype=torch.complex128, requires_grad=True)
    assert torch.allclose(torch_ops.gemm(a, b, c), a @ b + c)
    assert torch.autograd.gradcheck(torch_ops.gemm, (a, b, c))
    torch.library.opcheck(torch_ops.gemm, (a, b, c), test_utils=("test_schema", "test_faketensor"))


def test_gradients_of_a_real_operand_beside_a_complex_one():
    a = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    b = torch.randn(4, 2, dtype=torch.complex128, requires_grad=True)
    assert torch.autograd.gradcheck(torch_ops.gemm, (a, b))
    assert torch.autograd.gradgradcheck(torch_ops.gemm, (a, b))


@pytest.mark.slow  # torch loads its compiler
def test_what_torch_asks_of_an_operator():
    a, b = operand(3, 4, "N", dtype=torch.complex64), operand(4, 2, "N", dtype=torch.complex64)
    torch.library.opcheck(torch_ops.gemm, (a, b))
    torch.library.opcheck(torch_ops.gemm_reduce, (a.detach(), b.detach()), {"reduce": "absmax", "batch": True})


@pytest.mark.parametrize("reduce", ["sum", "absmax", "argmax", "sumsq"])
def test_reductions(reduce):
    a, b = torch.randn(2, 4, 5), torch.randn(5, 3)
    product = (a @ b).reshape(8, 3)
    expected = {
        "sum": product.sum(0),
        "absmax": product.abs().amax(0),
        "argmax": product.argmax(0),
        "sumsq": product.square().sum(0),
    }[reduce]
    found = torch.ops.gemmserve.gemm_reduce(a, b, reduce=reduce, batch=True)
    torch.testing.assert_close(found, expected)


def test_reductions_have_no_gradient():
    a, b = torch.randn(4, 5, requires_grad=True), torch.randn(5, 3)
    found = torch_ops.gemm_reduce(a, b)
    with pytest.raises(RuntimeError, match="grad"):
        found.sum().backward()


def test_gradients_are_not_lost_in_silence():
    a, b = torch.randn(4, 5, requires_grad=True), torch.randn(5, 3)
    with pytest.raises(ParameterInvalid, match="torch_ops"):
        gemm(a, b)
    with torch.no_grad():
        assert gemm(a, b).shape == (4, 3)


def test_refusals_are_typed():
    with pytest.raises(DtypeUnsupported, match="bfloat16"):
        gemm(torch.ones(2, 2).bfloat16(), torch.ones(2, 2).bfloat16())
    with pytest.raises(ParameterInvalid, match="sparse"):
        gemm(torch.eye(2).to_sparse(), torch.eye(2))
    with pytest.raises(ShapeMismatch):
        torch_ops.gemm(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(ParameterInvalid, match="memory that is neither"):
        gemm(torch.empty(2, 2, device="meta"), torch.eye(2))


def test_shapes_without_data():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        a, b = torch.empty(2, 4, 5), torch.empty(5, 3, dtype=torch.complex64)
        assert torch.ops.gemmserve.gemm(a, b, torch.empty(4, 3), trans_a="N", alpha=2j).shape == (2, 4, 3)
        found = torch.ops.gemmserve.gemm_reduce(a, b, reduce="argmax", axis="n", compute="fp32")
        assert (found.shape, found.dtype) == ((2, 4), torch.int64)
        with pytest.raises(DtypeUnsupported, match="bfloat16"):
            torch.ops.gemmserve.gemm(a.bfloat16(), a.mT.bfloat16())


def test_two_threads():
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    expected, found = gemm(a, b), []
    threads = [threading.Thread(target=lambda: found.append(torch_ops.gemm(a, b))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(each, expected) for each in found)
