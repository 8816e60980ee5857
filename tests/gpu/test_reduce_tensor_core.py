"""Reductions on tensor cores: every kind, axis and mode against higher precision, what is not finite, sums."""

from __future__ import annotations

import numpy as np
import pytest
from reduce_cases import COMPLEX, REAL, check, check_exact, exact, run
from simt_cases import CupyMachine, random

from gemmserve_kernels.algorithms.mma import gemm_reduce as mma
from gemmserve_kernels.algorithms.splits import gemm_reduce as planes
from gemmserve_kernels.algorithms.sums import gemm_reduce as sums
from gemmserve_kernels.device.launch import CupyLauncher
from gemmserve_kernels.problem.config import GemmConfig

pytestmark = pytest.mark.gpu
ALGORITHMS = {"wgmma": "3xfp16", "mma": "3xfp16", "mfma": "3xfp16", "tf32": "3xtf32"}


@pytest.fixture
def machine():
    return CupyMachine(CupyLauncher.current())


def route(machine, name):
    """(function, options) of a way to reduce."""
    spec = machine.launcher.spec
    foreign = (name == "mfma") != (spec.kind == "rocm") or (name == "wgmma" and spec.arch != "sm_90a")
    if foreign or ALGORITHMS[name] not in spec.compute_modes:
        pytest.skip(f"{spec.name} has no {name}")
    if name == "tf32":
        return mma.run_gemm_reduce, {"compute": "3xtf32"}
    return planes.run_gemm_reduce, {"compute": "3xfp16", "config": GemmConfig(algorithm=name)}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("axis", [["m"], ["n"], ["m", "batch"], ["n", "batch"]], ids=",".join)
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_every_reduction(machine, dtype, axis, name):
    function, options = route(machine, name)
    a, b = random(1, dtype, 3, 500, 300), random(2, dtype, 300, 270)
    names = COMPLEX if dtype == "complex64" else REAL
    check(machine, function, a, b, reduce=list(names), axis=axis, alpha=2, **options)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("pre_op", ["abs", "square"])
def test_pre_ops_with_the_product(machine, name, pre_op):
    function, options = route(machine, name)
    a, b = random(1, "complex64", 2, 200, 130), random(2, "complex64", 2, 130, 300)
    for axis in "mn":
        check(machine, function, a, b, reduce=["sumsq", "absmax"], axis=axis, pre_op=pre_op, return_c=True, **options)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("axis", ["m", "n"])
def test_ties_and_what_is_not_finite(machine, name, axis):
    function, options = route(machine, name)
    a, b = exact(1, "float32", 3, 300, 9), exact(2, "float32", 3, 9, 290)
    check_exact(machine, function, a, b, reduce=["max", "min", "argmax", "argmin"], axis=axis, **options)
    a[1, 7, 3], b[2, 4, 100] = np.nan, -np.inf
    with np.errstate(invalid="ignore"):
        check_exact(machine, function, a, b, reduce=["max", "min", "argmax", "argmin"], axis=axis, **options)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 300, 70), (300, 1, 7), (64, 64, 8192), (129, 257, 65)])
def test_extents(machine, name, m, n, k):
    function, options = route(machine, name)
    a, b = random(1, "complex64", m, k), random(2, "complex64", k, n)
    for axis in "mn":
        check(machine, function, a, b, reduce=list(COMPLEX), axis=axis, **options)


@pytest.mark.parametrize("name", ["wgmma", "mma"])
def test_shares_of_a_batch_have_the_same_bits(machine, name, monkeypatch):
    function, options = route(machine, name)
    a, b = random(1, "complex64", 5, 200, 150), random(2, "complex64", 5, 150, 140)
    options |= {"reduce": ["sum", "argmax"], "axis": "m"}
    _, whole = run(machine, function, a, b, **options)
    monkeypatch.setattr("gemmserve_kernels.algorithms.splits.gemm._WORKSPACE", 1 << 20)
    _, shares = run(machine, function, a, b, **options)
    for key, result in whole.items():
        np.testing.assert_array_equal(result, shares[key])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("axis", ["m", "n"])
def test_sums_without_the_product(machine, dtype, axis):
    a, b = random(1, dtype, 3, 700, 300), random(2, dtype, 300, 900)
    _, found = run(machine, sums.run_gemm_reduce, a, b, reduce=["sum", "mean"], axis=axis)
    wide = "c16" if np.dtype(dtype).kind == "c" else "f8"
    product = a.astype(wide) @ b.astype(wide)
    expected = product.sum(-2 if axis == "m" else -1)
    eps = np.finfo(found["sum"].dtype).eps
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found["sum"], expected, rtol=0, atol=max(8 * eps, 1e-12) * scale)
    np.testing.assert_allclose(
        found["mean"] * product.shape[-2 if axis == "m" else -1], expected, rtol=0, atol=1e-6 * scale
    )
