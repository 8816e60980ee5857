"""gemm_reduce on CuPy arrays against the oracle, and against NumPy where NaN and ties decide."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from host_products import array, join, on_device, products
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gemmserve_kernels import GemmConfig, GemmReduceProblem, Operand, gemm_reduce
from gemmserve_kernels.numerics.reference import reduction_errors

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

REAL = ["sum", "mean", "sumsq", "max", "min", "absmax", "absmin", "argmax", "argmin"]
COMPLEX = [name for name in REAL if name not in {"max", "min"}]
few = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture
def rng():
    return np.random.default_rng(1)


def check(a, b, limit, **options):
    """Runs on the device and compares with the oracle."""
    problem = GemmReduceProblem.build(Operand.of(a), Operand.of(b), **options)
    found = gemm_reduce(on_device(a), on_device(b), **options)
    found = found if isinstance(found, dict) else {problem.reductions[0]: found}
    assert list(found) == list(problem.results)
    for name, (shape, dtype) in problem.results.items():
        assert isinstance(found[name], cupy.ndarray)
        assert (found[name].shape, found[name].dtype) == (shape, dtype)
    for name, error in reduction_errors(problem, a, b, found).items():
        assert error < limit, (name, error)
    return found


@few
@given(products(with_c=False), st.sampled_from("mn"), st.booleans(), st.sampled_from(["identity", "abs", "square"]))
def test_everything_against_the_oracle(drawn, axis, over_batch, pre_op):
    options = drawn.options | {"axis": [axis, "batch"] if over_batch else [axis], "pre_op": pre_op, "return_c": True}
    names = COMPLEX if drawn.dtype.kind == "c" and pre_op != "abs" else REAL
    problem = GemmReduceProblem.build(Operand.of(drawn.a), Operand.of(drawn.b), **options)
    names = names if problem.extent else ["sum", "sumsq"]
    # Sums may cancel: their error is bounded absolutely elsewhere.
    limit = {2: 2e-2, 4: 1e-3, 8: 1e-3}.get(drawn.dtype.itemsize, 1e-10) if drawn.dtype != np.float64 else 1e-10
    check(drawn.a, drawn.b, limit, reduce=names, **options)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("axis", [["m"], ["n"], ["m", "batch"], ["n", "batch"]])
def test_several_tiles(rng, dtype, axis):
    a, b = array(rng, (3, 300, 70), dtype), array(rng, (3, 70, 200), dtype)
    # Of the smallest magnitudes, relative to themselves.
    limit = {"float16": 2e-3, "float32": 2e-4, "complex64": 2e-4}.get(dtype, 1e-11)
    check(a, b, limit, reduce=COMPLEX if dtype.startswith("c") else REAL, axis=axis, return_c=True)


@pytest.mark.parametrize(("axis", "over_batch"), list(itertools.product("mn", [False, True])))
@pytest.mark.parametrize("dtype", ["f4", "c8"])
def test_nan_and_first_index_as_in_numpy(axis, over_batch, dtype, rng):
    """Small integers make ties everywhere, across tiles too; NaN in A and B make rows and columns of them."""
    a = rng.integers(-2, 3, (3, 300, 2)).astype(dtype)
    b = rng.integers(-2, 3, (3, 2, 190)).astype(dtype)
    a[1, 4, 0] = a[2, 290, 1] = b[0, 1, 77] = np.nan
    product = a @ b
    lines = product if axis == "m" else product.swapaxes(-1, -2)
    lines = lines.reshape(-1, lines.shape[-1]) if over_batch else np.moveaxis(lines, -2, 0)
    ordered = np.abs(lines) if dtype == "c8" else lines
    names = ["absmax", "absmin", "argmax", "argmin", *(["max", "min"] if dtype == "f4" else [])]
    found = gemm_reduce(on_device(a), on_device(b), reduce=names, axis=[axis, "batch"] if over_batch else axis)
    assert np.array_equal(found["argmax"].get(), ordered.argmax(0))
    assert np.array_equal(found["argmin"].get(), ordered.argmin(0))
    assert np.allclose(found["absmax"].get(), np.abs(lines).max(0), equal_nan=True)
    assert np.allclose(found["absmin"].get(), np.abs(lines).min(0), equal_nan=True)
    if dtype == "f4":
        assert np.array_equal(found["max"].get(), lines.max(0), equal_nan=True)
        assert np.array_equal(found["min"].get(), lines.min(0), equal_nan=True)


def test_reproducible_sums_are_the_same_bit_for_bit(rng):
    a, b = on_device(array(rng, (4, 1000, 64), "c8")), on_device(array(rng, (4, 64, 300), "c8"))
    first = gemm_reduce(a, b, reduce=["sum", "sumsq"], axis=["m", "batch"])
    for _ in range(5):
        again = gemm_reduce(a, b, reduce=["sum", "sumsq"], axis=["m", "batch"])
        assert all(again[name].get().tobytes() == first[name].get().tobytes() for name in first)


def test_atomic_sums(rng):
    a, b = array(rng, (4, 1000, 64), "c8"), array(rng, (4, 64, 300), "c8")
    check(a, b, 1e-5, reduce=["sum", "sumsq", "mean", "absmax"], axis=["m", "batch"], reproducible=False)


def test_planar(rng):
    a, b = array(rng, (2, 3, 150, 40), "f4"), array(rng, (2, 40, 90), "f4")
    found = check(a, b, 2e-4, reduce=COMPLEX, axis="n", layout="planar", return_c=True, trans_a="N")
    assert np.allclose(join(found["sum"].get()), (join(a) @ join(b)).sum(-1), atol=1e-2)


def test_out_of_any_strides(rng):
    a, b = array(rng, (100, 30), "c8"), array(rng, (30, 60), "c8")
    total = cupy.zeros(120, "c8")[::2]
    found = gemm_reduce(on_device(a), on_device(b), reduce=["sum", "absmax"], out={"sum": total})
    assert found["sum"] is total
    assert np.allclose(total.get(), (a @ b).sum(0), atol=1e-3)


def test_empty_extents():
    found = gemm_reduce(cupy.empty((0, 4), "f4"), cupy.ones((4, 3), "f4"), reduce=["sum", "sumsq"])
    assert all(array.get().tolist() == [0, 0, 0] for array in found.values())
    found = gemm_reduce(cupy.empty((5, 0), "f4"), cupy.empty((0, 3), "f4"), reduce=["sum", "max", "argmax"])
    assert all(array.get().tolist() == [0, 0, 0] for array in found.values())


def test_a_chosen_tile(rng):
    a, b = array(rng, (200, 50), "f4"), array(rng, (50, 120), "f4")
    check(a, b, 2e-4, reduce=REAL, config=GemmConfig(block_m=32, block_n=32, block_k=8))
