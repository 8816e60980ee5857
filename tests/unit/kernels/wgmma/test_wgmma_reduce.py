"""Reductions on Hopper's kernel on the CPU shim, with the pre-pass and what falls back: tiles, splits of k, schemes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from reduce_cases import COMPLEX, REAL, check, check_exact, exact
from simt_cases import ShimMachine, random
from simt_shim import Order, ShimLauncher

from gemmserve_kernels import GemmConfig
from gemmserve_kernels.device import KNOWN
from gemmserve_kernels.planes.gemm_reduce import run_gemm_reduce


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
