"""Double precision on tensor cores, as the CPU shim plays them: every layout, what is not finite, races."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from dmma_cases import CASES, Case, excess, run
from fresh_rng import fresh_rng
from simt_shim import ORDERS, ShimLauncher

from gemmserve_kernels.algorithms.dmma import gemm as dmma
from gemmserve_kernels.algorithms.dmma import kernel
from gemmserve_kernels.algorithms.simt import gemm as simt
from gemmserve_kernels.device.spec import KNOWN


def shim(arch="sm_90a", **options):
    return ShimLauncher(replace(KNOWN["H200"], sm_count=3, arch=arch), **options)


def on_shim(case, tile, launcher=None, **options):
    launcher = launcher or shim()
    return run(launcher, case, tile, launcher.array, np.array, **options)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_layout(case):
    """All tiles, by either way of copying where the copy engine can, agree in every bit."""
    first, *others = case.tiles().values()
    problem, arrays, value = on_shim(case, first)
    assert excess(problem, arrays, value) <= 1
    for tile in others:
        np.testing.assert_array_equal(on_shim(case, tile)[2], value)
    np.testing.assert_array_equal(on_shim(case, others[-1], shim("sm_90"))[2], value)


@pytest.mark.parametrize(("steps", "first"), [(16, 16), (64, 32), (256, 128)])
def test_sums_are_those_of_runs(monkeypatch, steps, first):
    """Products of float32 numbers are exact in double: what is rounded is their sums. The first run is half as long."""
    monkeypatch.setattr(kernel, "run_of", lambda problem: steps)
    case = CASES["float64, runs"]
    a, b, _ = (None if x is None else x.astype(np.float32).astype(np.float64) for x in case.arrays())
    expected = np.zeros((a.shape[0], b.shape[1]))
    for start in (0, *range(first, a.shape[1], steps)):
        one = np.zeros_like(expected)
        for k in range(start, min(a.shape[1], first if start == 0 else start + steps)):
            one += a[:, k : k + 1] * b[k]
        expected += one
    assert (expected != sum(a[:, k : k + 1] * b[k] for k in range(a.shape[1]))).any()
    for tile in case.tiles().values():
        np.testing.assert_array_equal(on_shim(case, tile, arrays=(a, b, None))[2], expected)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("size", ["large", "small"])
def test_what_is_not_finite_ends_where_plain_arithmetic_has_it(dtype, size):
    case = Case((40, 50), (50, 70), dtype)
    a, b, _ = case.arrays()
    a[3, 5], b[2, 7], a[-1, 0] = np.nan, np.inf, -np.inf
    a[7] *= 2.0**-1030
    launcher = shim()
    problem, arrays, value = on_shim(case, case.tiles()[size], launcher, arrays=(a, b, None))
    plain = launcher.empty((40, 70), np.dtype(dtype))
    simt.run_gemm(launcher, problem, None, *(launcher.array(x) for x in arrays[:2]), None, plain)
    assert not np.isfinite(plain).all()
    np.testing.assert_allclose(value, plain, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(value[7], plain[7], rtol=1e-9, atol=0)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_permutations_and_gates_are_exact(dtype):
    rng = fresh_rng()
    x = Case((64, 1), (64, 33), dtype).arrays(rng.integers(1 << 30))[1]
    permutation = np.eye(64, dtype=dtype)[rng.permutation(64)]
    case = Case((64, 64), (64, 33), dtype)
    np.testing.assert_array_equal(on_shim(case, None, arrays=(permutation, x, None))[2], permutation @ x)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("name", ["float64", "complex128 AC BR", "planar, odd"])
def test_thread_orders_do_not_matter(name, order):
    case = CASES[name]
    tile = case.tiles()["small"]
    np.testing.assert_array_equal(on_shim(case, tile, shim(order=order))[2], on_shim(case, tile)[2])


@pytest.mark.parametrize("name", ["float64, strided", "complex128 AT BC", "planar, odd"])
def test_no_races_and_no_stray_accesses(name):
    """Threads copy: the checker follows no copy engine. Orders of threads and of its copies are tried above."""
    case = CASES[name]
    for tile in case.tiles().values():
        assert excess(*on_shim(case, tile, shim("sm_90", checked=True))) <= 1


def test_what_it_runs_on():
    problem = on_shim(CASES["complex128"], None)[0]
    assert dmma.supports(problem, KNOWN["A100"]) is None
    assert "NVIDIA" in dmma.supports(problem, KNOWN["MI300X"])
