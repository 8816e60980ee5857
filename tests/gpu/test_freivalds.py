"""Checks on the device: the same figures as the products themselves give, and wrong elements found."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from freivalds_cases import assert_figures, build, on
from host_products import on_device
from sampled_cases import assert_elements
from sampled_cases import on as elements_on
from simt_cases import CupyMachine, random, strided

from gemmserve_kernels import KernelError, gemm, gemm_reduce
from gemmserve_kernels.device.launch import CupyLauncher
from gemmserve_kernels.device.spec import DeviceSpec
from gemmserve_kernels.freivalds import freivalds_check
from gemmserve_kernels.freivalds.sampled_reductions import sampled_reduction_errors
from gemmserve_kernels.problem.problem import GemmReduceProblem, Operand

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

DTYPES = ("float16", "float32", "float64", "complex64", "complex128")


@pytest.fixture
def figures():
    return on(CupyMachine(CupyLauncher.current()))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_figures(figures, dtype, order):
    how = "plain" if order == "C" else "fortran"
    a, b, c = (strided(random(i, dtype, *s), how) for i, s in enumerate([(2, 300, 700), (700, 290), (300, 290)]))
    assert assert_figures(figures, a, b, c, alpha=1.5, beta=-0.5).excess < 1


@pytest.mark.parametrize(("trans_a", "trans_b"), list(itertools.product("NTCR", repeat=2)))
def test_operations(figures, trans_a, trans_b):
    a, b = random(1, "complex64", 70, 70), random(2, "complex64", 70, 70)
    assert_figures(figures, a, b, a, trans_a=trans_a, trans_b=trans_b, alpha=1.5 - 0.5j, beta=2j)


@pytest.mark.parametrize("how", ["reversed", "gaps", "offset", "padded", "constant rows"])
def test_strides(figures, how):
    a, b = strided(random(1, "complex64", 3, 34, 20), how), strided(random(2, "complex64", 20, 37), how)
    assert_figures(figures, a, b)


def test_planar_batches_and_edges(figures):
    a, b = random(1, "float32", 2, 33, 40), random(2, "float32", 2, 40, 21)
    assert_figures(figures, a, b, layout="planar", alpha=1j)
    assert_figures(figures, random(1, "float32", 3, 1, 20, 30), random(2, "float32", 2, 30, 13))
    for m, n, k in ((1, 1, 1), (1, 700, 3), (700, 1, 40), (5, 4, 0)):
        assert_figures(figures, random(1, "complex64", m, k), random(2, "complex64", k, n))


@pytest.fixture
def elements():
    return elements_on(CupyMachine(CupyLauncher.current()))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_elements(elements, dtype, order):
    how = "plain" if order == "C" else "fortran"
    a, b, c = (strided(random(i, dtype, *s), how) for i, s in enumerate([(2, 300, 700), (700, 290), (300, 290)]))
    assert assert_elements(elements, a, b, c, alpha=1.5, beta=-0.5)[0, 0] < 1
    a, b = strided(random(1, dtype, 3, 5000, 7), how), strided(random(2, dtype, 7, 90), how)
    assert_elements(elements, a, b)


@pytest.mark.parametrize(("trans_a", "trans_b"), list(itertools.product("NTCR", repeat=2)))
def test_operations_of_elements(elements, trans_a, trans_b):
    a, b = random(1, "complex64", 70, 70), random(2, "complex64", 70, 70)
    assert_elements(elements, a, b, a, trans_a=trans_a, trans_b=trans_b, alpha=1.5 - 0.5j, beta=2j)


def test_elements_of_planar_arrays_batches_and_edges(elements):
    a, b = random(1, "float32", 2, 33, 40), random(2, "float32", 2, 40, 21)
    assert_elements(elements, a, b, layout="planar", alpha=1j)
    assert_elements(elements, random(1, "float32", 3, 1, 20, 30), random(2, "float32", 2, 30, 13))
    assert_elements(elements, random(1, "complex64", 300, 4, 3), random(2, "complex64", 300, 3, 4))
    for m, n, k in ((1, 1, 1), (1, 700, 3), (700, 1, 40), (5, 4, 0)):
        assert_elements(elements, random(1, "complex64", m, k), random(2, "complex64", k, n))


def test_small_elements_that_are_lost_are_found_and_norms_do_not_see_them():
    """Heavy-tailed data, of which the device's own FP32 is in no doubt."""
    rng = cupy.random.default_rng()
    a, b = (cupy.exp(6 * rng.standard_normal(s)).astype("f4") for s in ((2048, 256), (256, 2048)))
    assert check_of(gemm(a, b, compute="fp32"), a, b, compute="fp32").element.excess < 2
    d = _truncated(a, 1) @ _truncated(b, 0)
    found = check_of(d.astype("f4"), a, b)
    assert found.excess < 4
    assert found.element.excess > 8


def _truncated(x, axis):
    """What planes keep of float32."""
    x = x.astype("f8")
    step = cupy.exp2(cupy.floor(cupy.log2(cupy.abs(x).max(axis=axis, keepdims=True)))) * 2.0**-40
    return cupy.where(cupy.abs(x) < step * 2.0**22, cupy.trunc(x / step) * step, x)


def test_the_host_finds_the_same():
    a, b = (random(i, "complex64", 500, 500) for i in (1, 2))
    d = (a.astype("c16") @ b).astype("c8")
    d[3] *= 1.1
    here = freivalds_check(build(a, b), a, b, None, d, 5)
    there = freivalds_check(build(a, b), *map(on_device, (a, b)), None, on_device(d), 5)
    assert here.element.place == there.element.place
    assert here.element.excess == pytest.approx(there.element.excess, rel=1e-6)


def check_of(d, *operands, **options):
    return freivalds_check(build(*operands, **options), *operands, None, d, seed=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_results_of_every_mode_are_in_no_doubt_and_a_wrong_element_is(dtype):
    a, b = (on_device(random(i, dtype, 1024, 1024)) for i in (1, 2))
    checked = 0
    for compute in ("auto", *DeviceSpec.current().compute_modes):
        try:
            d = gemm(a, b, compute=compute)
        except KernelError:  # not for this dtype
            continue
        found = check_of(d, a, b, compute=compute)
        assert 0 < found.residual < 1e-2
        assert found.excess < 2, compute
        assert found.element.excess < 2, compute
        checked += 1
        limit = 8 if compute in {"tf32", "1xtf32"} or dtype == "float16" else 80
        d[700, 33] += 100 if d.dtype.char in "efF" else 1e-6
        assert check_of(d, a, b, compute=compute).excess > limit, compute
    assert checked


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite(value):
    a, b = (on_device(random(i, "complex64", 100, 100)) for i in (1, 2))
    d = gemm(a, b)
    d[3, 4] = value
    assert check_of(d, a, b).excess == math.inf
    a[3, 4] = value
    assert math.isnan(check_of(gemm(a, b), a, b).excess)


def test_many_small_products():
    a, b = on_device(random(1, "complex64", 20_000, 16, 16)), on_device(random(2, "complex64", 20_000, 16, 16))
    d = gemm(a, b)
    assert check_of(d, a, b).excess < 1
    d[19_999, 15, 15] *= 1.01
    assert check_of(d, a, b).excess > 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_sampled_outputs_of_reductions(dtype):
    a, b = (on_device(random(i, dtype, 2, 300, 300)) for i in (1, 2))
    for axis in (["m"], ["n"], ["m", "batch"]):
        problem = GemmReduceProblem.build(*(Operand.of(x) for x in (a, b)), reduce=["absmax", "sumsq"], axis=axis)
        found = gemm_reduce(a, b, reduce=["absmax", "sumsq"], axis=axis)
        errors = sampled_reduction_errors(problem, a, b, found, np.random.default_rng(0))
        assert max(errors.values()) < (1e-3 if dtype == "float16" else 1e-5)
        found["absmax"] *= 1.5
        assert sampled_reduction_errors(problem, a, b, found, np.random.default_rng(0))["absmax"] > 0.1
