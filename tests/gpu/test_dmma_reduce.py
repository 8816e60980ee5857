"""Reductions in double precision on tensor cores on the device: axes, layouts, tiles; the product's bits."""

from __future__ import annotations

import numpy as np
import pytest
from reduce_cases import COMPLEX, REAL, check_exact, exact, run
from simt_cases import CupyMachine, assert_reduced, random

from gemmserve_kernels import GemmConfig, GemmProblem, Operand, gemm, gemm_reduce
from gemmserve_kernels.algorithms.dmma.gemm_reduce import run_gemm_reduce
from gemmserve_kernels.algorithms.dmma.tile import TILES
from gemmserve_kernels.device.launch import CupyLauncher
from gemmserve_kernels.numerics import reference

pytestmark = pytest.mark.gpu
DMMA = GemmConfig(algorithm="dmma")
AXES = pytest.mark.parametrize("axis", [["m"], ["n"], ["m", "batch"], ["n", "batch"]], ids=",".join)
DTYPES = pytest.mark.parametrize("dtype", ["float64", "complex128"])


@pytest.fixture
def machine():
    launcher = CupyLauncher.current()
    if launcher.spec.kind != "cuda" or int("".join(filter(str.isdigit, launcher.spec.arch))) < 80:
        pytest.skip(f"mma.sync in double: this is {launcher.spec.arch}")
    return CupyMachine(launcher)


def check(machine, a, b, **options):
    problem, results = run(machine, run_gemm_reduce, a, b, **options)
    assert_reduced(problem, a, b, results)
    return results


@AXES
@DTYPES
def test_every_reduction(machine, dtype, axis):
    a, b = random(1, dtype, 3, 275, 140), random(2, dtype, 3, 140, 181)
    names = list(COMPLEX if dtype == "complex128" else REAL)
    check(machine, a, b, reduce=names, axis=axis, alpha=2)


@pytest.mark.parametrize("trans", ["TT", "CR", "RN", "NC"])
@pytest.mark.parametrize("odd", [0, 1])
def test_operations_by_either_way_of_copying(machine, trans, odd):
    """Rows of 16-byte elements one element longer are no less aligned: those of float64 are."""
    for dtype in ("float64", "complex128"):
        a = random(1, dtype, *((140, 133 + odd) if trans[0] in "NR" else (133 + odd, 140)))
        b = random(2, dtype, *((133 + odd, 150) if trans[1] in "NR" else (150, 133 + odd)))
        check(machine, a, b, reduce=["sum", "argmin"], axis="m", trans_a=trans[0], trans_b=trans[1])


@pytest.mark.parametrize("kind", TILES)
def test_every_tile(machine, kind):
    planar = {"layout": "planar"} if kind == "planar" else {}
    dtype, leading = "complex128" if kind == "complex128" else "float64", (2,) if planar else ()
    a, b = random(1, dtype, *leading, 340, 700), random(2, dtype, *leading, 700, 270)
    for tile in TILES[kind]:
        if tile.shared_bytes <= machine.launcher.spec.shared_per_block:
            check(machine, a, b, reduce=["sum", "argmax", "absmin"], axis="n", config=tile, **planar)


@pytest.mark.parametrize("axis", ["m", "n"])
@DTYPES
def test_ties_give_the_first_index(machine, dtype, axis):
    a, b = exact(1, dtype, 2, 270, 3), exact(2, dtype, 2, 3, 290)
    check_exact(machine, run_gemm_reduce, a, b, reduce=["argmax", "argmin", "absmax"], axis=axis)


@DTYPES
def test_what_is_reduced_are_the_product_s_bits(machine, dtype):
    import cupy

    a, b = (cupy.asarray(random(seed, dtype, 4, 600, 520)) for seed in (1, 2))
    product = gemm(a, b, trans_b="T", config=DMMA)
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), trans_b="T")
    either = 4 * reference.bound(problem, a.get(), b.get())  # of both, and of both parts
    for axis, number in (("m", -2), ("n", -1)):
        names = ["absmax", "absmin", "argmax"] if dtype == "complex128" else ["max", "min", "argmax", "argmin"]
        found = gemm_reduce(a, b, trans_b="T", reduce=[*names, "sum"], axis=axis, return_c=True, config=DMMA)
        if dtype == "float64" or axis == "n":  # else imaginary parts add their two products the other way round
            np.testing.assert_array_equal(found["c"].get(), product.get())
        else:
            assert (np.abs(found["c"].get() - product.get()) <= either).all()
        again = gemm_reduce(a, b, trans_b="T", reduce=[*names, "sum"], axis=axis, config=DMMA)
        for name in again:
            np.testing.assert_array_equal(found[name].get(), again[name].get())
        if dtype == "float64":
            np.testing.assert_array_equal(found["max"].get(), product.max(number).get())
            np.testing.assert_array_equal(found["argmin"].get(), product.argmin(number).get())


def test_magnitudes_whose_squares_overflow_or_vanish(machine):
    a, b = random(1, "complex128", 240, 1), random(2, "complex128", 1, 130)
    for scale in (2.0**600, 2.0**-600):
        check(machine, a * scale, b, reduce=["absmax", "absmin", "argmax"], axis="m")


def test_atomic_sums(machine):
    a, b = random(1, "complex128", 400, 33), random(2, "complex128", 33, 450)
    check(machine, a, b, reduce=["sum", "sumsq", "absmax"], axis="n", reproducible=False)
