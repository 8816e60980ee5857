"""Sums and means of products without the products, on the CPU shim."""

from __future__ import annotations

import numpy as np
import pytest
from reduce_cases import build, run
from simt_cases import ShimMachine, random, strided
from simt_shim.launcher import ShimLauncher

from gemmserve_kernels.algorithms.sums import gemm_reduce as sums
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.numerics import reference


@pytest.fixture
def machine():
    return ShimMachine(ShimLauncher(KNOWN["A100"], checked=True))


def check(machine, a, b, **options):
    """In double to the last place that the result's dtype has, and no worse than a sum over a rounded product."""
    problem, results = run(machine, sums.run_gemm_reduce, a, b, reduce=["sum", "mean"], **options)
    assert sums.supports(problem, KNOWN["H200"]) is None
    with np.errstate(all="ignore"):
        exact = reference.oracle_gemm_reduce(problem, a, b)
    for name, found in results.items():
        planar = problem.planar and problem.value_dtype.kind == "c"
        found = found[0] + 1j * found[1] if planar else found  # noqa: PLW2901
        size = np.abs(exact[name]).max(initial=0)
        unit = np.finfo(found.dtype).eps * (4 if np.finfo(found.dtype).bits == 32 else 400)
        np.testing.assert_allclose(found, exact[name], rtol=0, atol=unit * max(size, 1e-30), err_msg=name)
    return results


@pytest.mark.parametrize("axis", [["m"], ["n"], ["m", "batch"], ["n", "batch"]], ids=",".join)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
def test_every_dtype_and_axis(machine, dtype, axis):
    a, b = random(1, dtype, 2, 75, 40), random(2, dtype, 2, 40, 81)
    check(machine, a, b, axis=axis, alpha=2)


@pytest.mark.parametrize("trans_a", "NTCR")
@pytest.mark.parametrize("trans_b", "NTCR")
def test_operations(machine, trans_a, trans_b):
    a, b = random(1, "complex64", 40, 40), random(2, "complex64", 40, 40)
    check(machine, a, b, trans_a=trans_a, trans_b=trans_b, alpha=1 - 2j, axis="n")


@pytest.mark.parametrize("how", ["fortran", "reversed", "gaps", "offset", "padded", "constant rows"])
def test_strides(machine, how):
    a, b = strided(random(1, "complex64", 3, 34, 50), how), strided(random(2, "complex64", 50, 37), how)
    check(machine, a, b, axis="m")
    check(machine, a, b, axis="n")


def test_several_parts_and_broadcasting(machine):
    """More rows than one block takes, on both sides; matrices that are shared are summed once."""
    a, b = random(1, "float32", 2, 1, 600, 300), random(2, "float32", 3, 300, 5)
    check(machine, a, b)
    a, b = random(1, "float32", 20, 2100), random(2, "float32", 4, 2100, 3)
    check(machine, a, b, axis="n", trans_a="N")


def test_planar_and_mixed(machine):
    a, b = random(1, "float32", 2, 33, 40), random(2, "float32", 2, 40, 21)
    check(machine, a, b, layout="planar", axis="n", alpha=1j)
    check(machine, random(1, "float32", 33, 40), random(2, "complex64", 40, 21))


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 70, 3), (70, 1, 40)])
def test_edges(machine, m, n, k):
    for axis in "mn":
        check(machine, random(1, "complex64", m, k), random(2, "complex64", k, n), axis=axis)


def test_not_finite(machine):
    a, b = random(1, "float32", 40, 20), random(2, "float32", 20, 30)
    a[3, 4], b[7, 8], b[:, 9] = np.inf, np.nan, 0
    _, found = run(machine, sums.run_gemm_reduce, a, b, reduce="sum")
    with np.errstate(invalid="ignore"):
        expected = (a.astype("f8") @ b).sum(0)
    np.testing.assert_allclose(found["sum"], expected, rtol=1e-5)


def test_the_same_bits_in_any_batch(machine):
    a, b = random(1, "complex64", 5, 300, 40), random(2, "complex64", 5, 40, 33)
    _, together = run(machine, sums.run_gemm_reduce, a, b, reduce="sum")
    for i in range(5):
        _, alone = run(machine, sums.run_gemm_reduce, a[i], b[i], reduce="sum")
        np.testing.assert_array_equal(together["sum"][i], alone["sum"])


def test_long_grids_are_cut():
    on = ShimMachine(ShimLauncher(KNOWN["A100"], max_grid=3))
    check(on, random(1, "complex64", 5, 300, 100), random(2, "complex64", 5, 100, 133))


@pytest.mark.parametrize("options", [{"reduce": "sumsq"}, {"pre_op": "abs"}, {"return_c": True}], ids=str)
def test_what_needs_the_product(options):
    problem = build(random(1, "complex64", 4, 5), random(2, "complex64", 5, 6), **options)
    assert "product" in sums.supports(problem, KNOWN["H200"])
