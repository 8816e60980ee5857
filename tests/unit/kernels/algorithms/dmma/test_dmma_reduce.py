"""Reductions in double precision on tensor cores, on the CPU shim: every kind, axis, layout; the product's bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from reduce_cases import COMPLEX, REAL, build, check_exact, exact, run
from simt_cases import ShimMachine, assert_reduced, random
from simt_shim import ORDERS, ShimLauncher

from gemmserve_kernels.algorithms.dmma.gemm_reduce import resolve, run_gemm_reduce, supports
from gemmserve_kernels.algorithms.dmma.tile import TILES
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ConfigInfeasible

AXES = pytest.mark.parametrize("axis", [["m"], ["n"], ["m", "batch"], ["n", "batch"]], ids=",".join)


def machine(arch="sm_90a", **options):
    return ShimMachine(ShimLauncher(replace(KNOWN["H200"], sm_count=3, arch=arch), **options))


def check(on, a, b, **options):
    problem, results = run(on, run_gemm_reduce, a, b, **options)
    assert_reduced(problem, a, b, results)
    return results


@AXES
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_every_reduction(dtype, axis):
    """By the copy engine and by threads that copy: one result, bit for bit."""
    a, b = random(1, dtype, 3, 75, 40), random(2, dtype, 3, 40, 81)
    names = list(COMPLEX if dtype == "complex128" else REAL)
    first = check(machine(), a, b, reduce=names, axis=axis, alpha=2)
    again = check(machine("sm_90"), a, b, reduce=names, axis=axis, alpha=2)
    for name in names:
        np.testing.assert_array_equal(first[name], again[name])


@pytest.mark.parametrize("kind", TILES)
def test_every_tile(kind):
    planar = {"layout": "planar"} if kind == "planar" else {}
    dtype = "complex128" if kind == "complex128" else "float64"
    leading = (2,) if planar else ()
    a, b = random(1, dtype, *leading, 140, 50), random(2, dtype, *leading, 50, 70)
    for tile in TILES[kind]:
        check(machine(), a, b, reduce=["sum", "argmax", "absmin"], axis="n", config=tile, **planar)


@pytest.mark.parametrize("pre_op", ["identity", "abs", "square"])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_pre_ops(dtype, pre_op):
    a, b = random(1, dtype, 40, 33), random(2, dtype, 33, 50)
    names = REAL if pre_op == "abs" or dtype == "float64" else COMPLEX
    check(machine(), a, b, reduce=list(names), pre_op=pre_op, alpha=1 - 2j if dtype == "complex128" else -1.5)


@pytest.mark.parametrize("axis", ["m", "n"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_with_the_product(axis, order):
    a, b = random(1, "complex128", 2, 40, 33), random(2, "complex128", 33, 50)
    check(machine(), a, b, reduce=["absmax", "sum"], axis=axis, return_c=True, order=order)


@pytest.mark.parametrize("trans", ["TT", "CR", "RN", "NC"])
def test_operations(trans):
    a = random(1, "complex128", *((40, 33) if trans[0] in "NR" else (33, 40)))
    b = random(2, "complex128", *((33, 50) if trans[1] in "NR" else (50, 33)))
    check(machine(), a, b, reduce=["sum", "argmin"], axis="m", trans_a=trans[0], trans_b=trans[1])


def test_operations_on_planes():
    a, b = random(1, "float64", 2, 33, 40), random(2, "float64", 2, 50, 33)
    options = {"trans_a": "C", "trans_b": "T", "layout": "planar"}
    check(machine(), a, b, reduce=["sum", "argmax", "sumsq"], axis="n", **options)


def test_a_batch_that_repeats():
    a, b = random(1, "float64", 3, 1, 20, 40), random(2, "float64", 2, 40, 30)
    check(machine(), a, b, reduce=["max", "sum"], axis=["m", "batch"])
    check(machine(), a, b, reduce=["max", "sum"], axis="n")


@pytest.mark.parametrize("axis", ["m", "n"])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_ties_give_the_first_index(dtype, axis):
    a, b = exact(1, dtype, 2, 70, 3), exact(2, dtype, 2, 3, 90)
    check_exact(machine(), run_gemm_reduce, a, b, reduce=["argmax", "argmin", "absmax"], axis=axis)


def test_not_finite():
    a, b = exact(1, "float64", 70, 5), exact(2, "float64", 5, 66)
    b[:, 3], b[0, 7], b[2, 40] = -np.inf, np.nan, np.inf
    a[:, :] = np.abs(a) + 1
    with np.errstate(invalid="ignore"):
        check_exact(machine(), run_gemm_reduce, a, b, reduce=["max", "min", "argmax", "argmin"])


def test_magnitudes_whose_squares_overflow_or_vanish():
    a, b = random(1, "complex128", 40, 1), random(2, "complex128", 1, 30)
    for scale in (2.0**600, 2.0**-600):
        check(machine(), a * scale, b, reduce=["absmax", "absmin", "argmax"], axis="m")


def test_atomic_sums():
    a, b = random(1, "complex128", 40, 33), random(2, "complex128", 33, 150)
    check(machine(), a, b, reduce=["sum", "sumsq", "absmax"], axis="n", reproducible=False)


def test_what_is_reduced_are_the_product_s_bits():
    a, b = random(1, "float64", 70, 300), random(2, "float64", 300, 41)
    _, results = run(machine(), run_gemm_reduce, a, b, reduce=["max", "min"], axis="m", return_c=True)
    np.testing.assert_array_equal(results["max"], results["c"].max(0))
    np.testing.assert_array_equal(results["min"], results["c"].min(0))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_thread_orders_do_not_matter(order):
    a, b = random(1, "complex128", 70, 40), random(2, "complex128", 40, 81)
    options = {"reduce": ["sum", "absmax", "argmin"], "axis": "m"}
    expected = check(machine(), a, b, **options)
    found = check(machine(order=order), a, b, **options)
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])


def test_no_races_and_no_stray_accesses():
    a, b = random(1, "complex128", 2, 70, 40), random(2, "complex128", 40, 81)
    check(machine("sm_90", checked=True), a, b, reduce=["sum", "absmax", "argmax"], axis="n", return_c=True)


def test_blocks_that_are_asked_for():
    problem = build(random(1, "complex128", 70, 40), random(2, "complex128", 40, 81), reduce="absmax", axis="m")
    tile = resolve(GemmConfig(block_m=64, block_n=32), problem, KNOWN["H200"])
    assert (tile.block_m, tile.block_n) == (32, 64)  # of the transposed product
    with pytest.raises(ConfigInfeasible, match="block_m, block_n"):
        resolve(GemmConfig(block_m=17), problem, KNOWN["H200"])
    with pytest.raises(ConfigInfeasible, match="stages"):
        resolve(GemmConfig(stages=2), problem, KNOWN["H200"])


def test_what_it_runs_on():
    double = build(random(1, "complex128", 7, 4), random(2, "complex128", 4, 8), reduce="absmax")
    single = build(random(1, "complex64", 7, 4), random(2, "complex64", 4, 8), reduce="absmax")
    assert supports(double, KNOWN["A100"]) is None
    assert "NVIDIA" in supports(double, KNOWN["MI300X"])
    assert "complex64" in supports(single, KNOWN["H200"])
