"""Reductions on Hopper's kernel on the CPU shim, with the pre-pass and what falls back: tiles, splits of k, schemes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from reduce_cases import COMPLEX, REAL, check, check_exact, exact, run
from simt_cases import ShimMachine, random
from simt_shim import Order, ShimLauncher

from gemmserve_kernels import GemmConfig
from gemmserve_kernels.algorithms.splits.gemm_reduce import run_gemm_reduce
from gemmserve_kernels.device.spec import KNOWN


@pytest.fixture
def machine():
    """Few multiprocessors, so that blocks walk over several tiles."""
    return ShimMachine(ShimLauncher(replace(KNOWN["H200"], sm_count=2), order=Order("shuffled", 5)))


@pytest.mark.parametrize("config", [None, GemmConfig(block_m=64, block_n=64, split_k=2)], ids=["chosen", "split"])
@pytest.mark.parametrize("axis", [["m"], ["n", "batch"]], ids=",".join)
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_every_reduction(machine, dtype, axis, config):
    a, b = random(1, dtype, 2, 75, 100), random(2, dtype, 100, 130)
    names = list(COMPLEX if dtype == "complex64" else REAL)
    options = {"reduce": names, "axis": axis, "compute": "3xfp16", "return_c": True, "alpha": -2}
    check(machine, run_gemm_reduce, a, b, config=config, **options)
    assert "wgmma_reduce" in machine.launcher.launches


@pytest.mark.parametrize("axis", ["m", "n"])
def test_one_plane(machine, axis):
    a, b = random(1, "complex64", 130, 40), random(2, "complex64", 40, 66)
    check(machine, run_gemm_reduce, a, b, reduce=["absmax", "sumsq"], axis=axis, compute="tf32", pre_op="square")


def test_ties_and_what_is_not_finite(machine):
    a, b = exact(1, "float32", 70, 5), exact(2, "float32", 5, 66)
    b[1, 3], a[4, 2] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        for axis in "mn":
            names = ["max", "min", "argmax", "argmin"]
            check_exact(machine, run_gemm_reduce, a, b, reduce=names, axis=axis, compute="3xfp16")


def test_the_same_bits_again_and_in_another_batch(machine):
    a, b = random(1, "complex64", 3, 70, 40), random(2, "complex64", 40, 66)
    options = {"reduce": ["sum", "absmax"], "axis": "n", "compute": "3xfp16"}
    first, second = (check(machine, run_gemm_reduce, a, b, **options) for _ in range(2))
    alone = check(machine, run_gemm_reduce, a[1], b, **options)
    for name, result in first.items():
        np.testing.assert_array_equal(result, second[name])
        np.testing.assert_array_equal(result[1], alone[name])


def test_magnitudes_whose_squares_a_float_does_not_hold(machine):
    """Whole tiles of small exponents, of large ones and of both; zeros, infinity and NaN among them."""
    rng = np.random.default_rng(3)
    for scale in (1.0, 2.0**70, 2.0**-70):
        a, b = random(1, "complex64", 130, 40), random(2, "complex64", 40, 140)
        a *= np.float32(scale)
        a[5], b[:, 7] = 0, 0
        for axis in "mn":
            names = ["absmax", "absmin", "argmax", "argmin"]
            check(machine, run_gemm_reduce, a, b, reduce=names, axis=axis, compute="3xfp16")
    a, b = random(3, "complex64", 130, 40), random(4, "complex64", 40, 140)
    a *= np.exp2(rng.integers(-60, 60, 130)).astype(np.float32)[:, None]
    for axis in "mn":
        check(machine, run_gemm_reduce, a, b, reduce=["absmax", "argmax"], axis=axis, compute="3xfp16")
    a[3, 2], a[9, 1] = np.nan, complex(np.inf, 1)
    results = run(machine, run_gemm_reduce, a, b, reduce=["absmax", "argmax"], axis="n", compute="3xfp16")[1]
    assert np.isnan(results["absmax"]).nonzero()[0].tolist() == [3]
    assert np.isinf(results["absmax"]).nonzero()[0].tolist() == [9]


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_whole_tiles_have_the_bits_of_others(machine, dtype):
    """With alpha 1 and a factor's exponents tiles take a shorter way; alpha -1 and large ones forbid it."""
    a, b = random(5, dtype, 128, 70), random(6, dtype, 70, 128)
    options = {"reduce": ["absmax", "sum", "sumsq"], "axis": "m", "compute": "3xfp16", "return_c": True}
    short = check(machine, run_gemm_reduce, a, b, **options)
    negative = check(machine, run_gemm_reduce, a, b, alpha=-1, **options)
    large = check(machine, run_gemm_reduce, a * np.float32(2.0**50), b, **options)
    for name, power in (("absmax", 50), ("sum", 50), ("sumsq", 100), ("c", 50)):
        np.testing.assert_array_equal(short[name], negative[name] * (-1 if name in {"sum", "c"} else 1))
        scaled = np.ldexp(large[name].view(np.float32), -power).view(short[name].dtype)
        np.testing.assert_array_equal(short[name], scaled)
