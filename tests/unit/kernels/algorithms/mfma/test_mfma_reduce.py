"""Reductions by mfma_reduce on the CPU shim: every kind, axis and dtype, ties, NaN, the product beside."""

from __future__ import annotations

import numpy as np
import pytest
from reduce_cases import COMPLEX, REAL, check, check_exact, exact, run
from simt_cases import ShimMachine, random
from simt_shim import ShimLauncher

from gemmserve_kernels.algorithms.mfma.gemm_reduce import run_gemm_reduce
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.problem.config import GemmConfig

SMALL = GemmConfig(block_m=64, block_n=64, warp_m=32, warp_n=32)


@pytest.fixture
def machine():
    return ShimMachine(ShimLauncher(KNOWN["MI300X"], optimize="-O1"))


@pytest.mark.parametrize("axis", [["m"], ["n"], ["m", "batch"], ["n", "batch"]], ids=",".join)
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_every_reduction(machine, dtype, axis):
    a, b = random(1, dtype, 3, 75, 40), random(2, dtype, 3, 40, 81)
    names = COMPLEX if dtype == "complex64" else REAL
    check(machine, run_gemm_reduce, a, b, reduce=list(names), axis=axis, alpha=2, config=SMALL)


@pytest.mark.parametrize("dtype", ["float16", "float64", "complex128"])
def test_other_dtypes(machine, dtype):
    a, b = random(1, dtype, 40, 33), random(2, dtype, 33, 70)
    names = COMPLEX if np.dtype(dtype).kind == "c" else REAL
    check(machine, run_gemm_reduce, a, b, reduce=list(names), axis="n", return_c=True)


@pytest.mark.parametrize("pre_op", ["abs", "square"])
def test_pre_ops(machine, pre_op):
    a, b = random(1, "complex64", 40, 33), random(2, "complex64", 33, 50)
    names = REAL if pre_op == "abs" else COMPLEX
    check(machine, run_gemm_reduce, a, b, reduce=list(names), pre_op=pre_op, alpha=1 - 2j, config=SMALL)


@pytest.mark.parametrize("axis", ["m", "n"])
def test_with_the_product(machine, axis):
    a, b = random(1, "complex64", 2, 40, 33), random(2, "complex64", 33, 50)
    options = {"reduce": ["absmax", "sum"], "axis": axis, "return_c": True, "config": SMALL}
    check(machine, run_gemm_reduce, a, b, **options)
    check(machine, run_gemm_reduce, a, b, order="F", **options)


def test_operations_planar_and_xf32(machine):
    a, b = random(1, "float32", 2, 33, 40), random(2, "float32", 2, 50, 33)
    options = {"trans_a": "C", "trans_b": "T", "layout": "planar", "axis": "n", "reduce": ["sum", "argmax", "sumsq"]}
    check(machine, run_gemm_reduce, a, b, config=SMALL, **options)
    check(machine, run_gemm_reduce, a, b, config=SMALL, compute="tf32", **options)


@pytest.mark.parametrize("axis", ["m", "n"])
def test_ties_give_the_first_index(machine, axis):
    a, b = exact(1, "float32", 2, 150, 3), exact(2, "float32", 2, 3, 140)
    check_exact(machine, run_gemm_reduce, a, b, reduce=["argmax", "argmin", "absmax"], axis=axis, config=SMALL)


def test_not_finite(machine):
    a, b = exact(1, "float32", 70, 5), exact(2, "float32", 5, 66)
    b[:, 3], b[0, 7], b[2, 40] = -np.inf, np.nan, np.inf
    a[:, :] = np.abs(a) + 1
    with np.errstate(invalid="ignore"):
        check_exact(machine, run_gemm_reduce, a, b, reduce=["max", "min", "argmax", "argmin"], config=SMALL)
        _, found = run(machine, run_gemm_reduce, a, b, reduce=["sum", "sumsq"], config=SMALL)
    assert found["sum"][3] == -np.inf
    assert np.isnan(found["sum"][7])
    assert found["sumsq"][40] == np.inf


def test_repeats_have_the_same_bits_and_atomic_sums_the_same_values(machine):
    a, b = random(1, "complex64", 3, 150, 20), random(2, "complex64", 20, 40)
    options = {"reduce": ["sum", "sumsq", "argmax"], "axis": ["m", "batch"], "config": SMALL}
    first = check(machine, run_gemm_reduce, a, b, **options)
    again = check(machine, run_gemm_reduce, a, b, **options)
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])
    check(machine, run_gemm_reduce, a, b, reproducible=False, **options)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 100, 3), (100, 1, 40), (33, 17, 9)])
def test_edges(machine, m, n, k):
    a, b = random(1, "float32", m, k), random(2, "float32", k, n)
    for axis in ("m", "n"):
        check(machine, run_gemm_reduce, a, b, reduce=list(REAL), axis=axis, config=SMALL)
