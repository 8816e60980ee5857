"""Reductions by mma_reduce on the CPU shim: every kind, axis and mode, ties, NaN, splits of k."""

from __future__ import annotations

import numpy as np
import pytest
from reduce_cases import COMPLEX, REAL, check, check_exact, exact, run
from simt_cases import ShimMachine, random
from simt_shim.launcher import ShimLauncher

from gemmserve_kernels import GemmConfig
from gemmserve_kernels.algorithms.mma.gemm_reduce import run_gemm_reduce
from gemmserve_kernels.device.spec import KNOWN


@pytest.fixture
def machine():
    return ShimMachine(ShimLauncher(KNOWN["A100"]))


@pytest.mark.parametrize("axis", [["m"], ["n"], ["m", "batch"], ["n", "batch"]], ids=",".join)
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_every_reduction(machine, dtype, axis):
    a, b = random(1, dtype, 3, 75, 40), random(2, dtype, 3, 40, 81)
    names = COMPLEX if dtype == "complex64" else REAL
    check(machine, run_gemm_reduce, a, b, reduce=list(names), axis=axis, compute="3xtf32", alpha=2)


@pytest.mark.parametrize("pre_op", ["identity", "abs", "square"])
@pytest.mark.parametrize("compute", ["3xtf32", "1xtf32"])
def test_modes_and_pre_ops(machine, compute, pre_op):
    a, b = random(1, "complex64", 40, 33), random(2, "complex64", 33, 50)
    names = REAL if pre_op == "abs" else COMPLEX
    check(machine, run_gemm_reduce, a, b, reduce=list(names), pre_op=pre_op, compute=compute, alpha=1 - 2j)


@pytest.mark.parametrize("axis", ["m", "n"])
def test_with_the_product(machine, axis):
    a, b = random(1, "complex64", 2, 40, 33), random(2, "complex64", 33, 50)
    options = {"reduce": ["absmax", "sum"], "axis": axis, "return_c": True, "compute": "3xtf32"}
    check(machine, run_gemm_reduce, a, b, **options)
    check(machine, run_gemm_reduce, a, b, order="F", **options)


def test_operations_and_planar(machine):
    a, b = random(1, "float32", 2, 33, 40), random(2, "float32", 2, 50, 33)
    options = {"trans_a": "C", "trans_b": "T", "layout": "planar", "compute": "3xtf32"}
    check(machine, run_gemm_reduce, a, b, reduce=["sum", "argmax", "sumsq"], axis="n", **options)


@pytest.mark.parametrize("axis", ["m", "n"])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_ties_give_the_first_index(machine, dtype, axis):
    a, b = exact(1, dtype, 2, 70, 3), exact(2, dtype, 2, 3, 90)
    check_exact(machine, run_gemm_reduce, a, b, reduce=["argmax", "argmin", "absmax"], axis=axis, compute="3xtf32")


def test_not_finite(machine):
    a, b = exact(1, "float32", 70, 5), exact(2, "float32", 5, 66)
    b[:, 3], b[0, 7], b[2, 40] = -np.inf, np.nan, np.inf
    a[:, :] = np.abs(a) + 1
    with np.errstate(invalid="ignore"):
        check_exact(machine, run_gemm_reduce, a, b, reduce=["max", "min", "argmax", "argmin"], compute="3xtf32")
        _, found = run(machine, run_gemm_reduce, a, b, reduce=["sum", "sumsq"], compute="3xtf32")
    assert found["sum"][3] == -np.inf
    assert np.isnan(found["sum"][7])
    assert found["sumsq"][40] == np.inf


def test_splits_of_k_and_repeats(machine):
    a, b = random(1, "complex64", 20, 600), random(2, "complex64", 600, 30)
    config = GemmConfig(split_k=3)
    options = {"reduce": ["sum", "absmax", "argmin"], "axis": "n", "compute": "3xtf32", "config": config}
    first = check(machine, run_gemm_reduce, a, b, **options)
    again = check(machine, run_gemm_reduce, a, b, **options)
    for name in first:
        np.testing.assert_array_equal(first[name], again[name])


def test_atomic_sums(machine):
    a, b = random(1, "complex64", 3, 75, 20), random(2, "complex64", 20, 40)
    options = {"reduce": ["sum", "sumsq", "argmax"], "axis": ["m", "batch"], "compute": "3xtf32"}
    check(machine, run_gemm_reduce, a, b, reproducible=False, **options)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 100, 3), (100, 1, 40), (33, 17, 9)])
@pytest.mark.parametrize("axis", ["m", "n"])
def test_edges(machine, m, n, k, axis):
    a, b = random(1, "float32", m, k), random(2, "float32", k, n)
    check(machine, run_gemm_reduce, a, b, reduce=list(REAL), axis=axis, compute="3xtf32")
