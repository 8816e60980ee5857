"""Double precision on tensor cores, as the CPU shim plays them: every layout, what is not finite, races."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from dmma_cases import CASES, Case, excess, run
from simt_shim import ORDERS, ShimLauncher

from gemmserve_kernels.device import KNOWN
from gemmserve_kernels.dmma import gemm as dmma
from gemmserve_kernels.dmma.tiles import LARGE, SMALL, choose
from gemmserve_kernels.simt import gemm as simt


def shim(**options):
    return ShimLauncher(replace(KNOWN["H200"], sm_count=3), **options)


def on_shim(case, tile, launcher=None, **options):
    launcher = launcher or shim()
    return run(launcher, case, tile, launcher.array, np.array, **options)


@pytest.mark.parametrize("size", ["large", "small"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_layout(case, size):
    assert excess(*on_shim(case, case.tiles()[size])) <= 1


@pytest.mark.parametrize("k", [(4, 8), (8, 8), (16, 16)], ids=str)
@pytest.mark.parametrize("trans", ["NN", "TN", "NT"])
def test_every_instruction(k, trans):
    tile = replace(LARGE["float64"], instruction_k=k[0], read_k=k[1], block_m=64, block_k=32, stages=2)
    a, b = ((20, 35), (35, 17)) if trans == "NN" else ((35, 20), (35, 17)) if trans == "TN" else ((20, 35), (17, 35))
    case = Case(a, b, options={"trans_a": trans[0], "trans_b": trans[1]})
    assert excess(*on_shim(case, tile)) <= 1


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
    rng = np.random.default_rng()
    x = Case((64, 1), (64, 33), dtype).arrays(rng.integers(1 << 30))[1]
    permutation = np.eye(64, dtype=dtype)[rng.permutation(64)]
    case = Case((64, 64), (64, 33), dtype)
    np.testing.assert_array_equal(on_shim(case, None, arrays=(permutation, x, None))[2], permutation @ x)


def test_few_tiles_are_small():
    spec = KNOWN["H200"]
    assert choose(8192, 8192, spec, is_complex=False, planar=False) == LARGE["float64"]
    assert choose(256, 256, spec, is_complex=True, planar=False) == SMALL["complex128"]
    assert choose(2048, 2048, spec, is_complex=True, planar=True) == LARGE["planar"]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("name", ["float64", "complex128 AC BR"])
def test_thread_orders_do_not_matter(name, order):
    case = CASES[name]
    tile = case.tiles()["small"]
    np.testing.assert_array_equal(on_shim(case, tile, shim(order=order))[2], on_shim(case, tile)[2])


@pytest.mark.parametrize("name", ["float64, strided", "complex128 AT BC", "planar, odd"])
def test_no_races_and_no_stray_accesses(name):
    case = CASES[name]
    for tile in case.tiles().values():
        assert excess(*on_shim(case, tile, shim(checked=True))) <= 1


def test_what_it_runs_on():
    problem = on_shim(CASES["complex128"], None)[0]
    assert dmma.supports(problem, KNOWN["A100"]) is None
    assert "NVIDIA" in dmma.supports(problem, KNOWN["MI300X"])
