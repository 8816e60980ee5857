"""The MFMA kernel on the CPU shim, which plays the matrix instructions: the unmodified source and host code."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from kernel_models import mfma as model
from mfma_cases import BOTH, SMALL, SMALL_DOUBLE, check, run
from simt_cases import ShimMachine, assert_within, random, strided
from simt_shim import ORDERS, ShimLauncher

from gemmserve_kernels.algorithms.mfma import gemm as mfma
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.problem import GemmProblem, Operand

MI300X, MI250X = KNOWN["MI300X"], KNOWN["MI250X"]


@pytest.fixture
def machine():
    return ShimMachine(ShimLauncher(MI300X, optimize="-O1"))


@pytest.mark.parametrize(
    ("dtype", "trans"),
    [
        *(("complex64", trans) for trans in ("NN", "TC", "CT", "RR")),
        *((dtype, trans) for dtype in ("float16", "float32", "float64", "complex128") for trans in ("NT", "CR")),
    ],
)
def test_operations(machine, dtype, trans):
    m, n, k = 70, 41, 37
    a = random(1, dtype, *((k, m) if trans[0] in "TC" else (m, k)))
    b = random(2, dtype, *((n, k) if trans[1] in "TC" else (k, n)))
    options = BOTH if np.dtype(dtype).kind == "c" else {"alpha": 1.5, "beta": -0.5}
    check(machine, a, b, random(3, dtype, m, n), trans_a=trans[0], trans_b=trans[1], **options)


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (64, 64, 16), (65, 1, 7), (1, 90, 3), (128, 64, 8), (33, 31, 129)]
)
def test_extents(machine, m, n, k):
    check(machine, random(1, "float32", m, k), random(2, "float32", k, n))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("how_a", "how_b", "out"),
    [("fortran", "fortran", "fortran"), ("reversed", "gaps", "reversed"), ("offset", "padded", "gaps")],
)
def test_strides(machine, dtype, how_a, how_b, out):
    a, b = strided(random(1, dtype, 40, 48), how_a), strided(random(2, dtype, 48, 56), how_b)
    check(machine, a, b, random(3, dtype, 40, 56), beta=1, out=out)


def test_batches_and_broadcasts(machine):
    a, b = random(1, "complex64", 2, 1, 3, 17, 6), random(2, "complex64", 4, 1, 6, 9)
    whole = check(machine, a, b, random(3, "complex64", 4, 3, 17, 9), **BOTH)
    launcher = ShimLauncher(MI300X, optimize="-O1", max_grid=5)
    again = check(ShimMachine(launcher), a, b, random(3, "complex64", 4, 3, 17, 9), **BOTH)
    np.testing.assert_array_equal(whole, again)
    assert len(launcher.launches) == 5
    alone = check(machine, a[1, 0, 2], b[3, 0], random(3, "complex64", 4, 3, 17, 9)[3, 2], **BOTH)
    np.testing.assert_array_equal(whole[1, 3, 2], alone)


def test_planar(machine):
    a, b, c = (random(i, "float32", 2, *shape) for i, shape in enumerate([(18, 21), (10, 21), (18, 10)]))
    for out in ("plain", "fortran"):
        check(machine, a, b, c, layout="planar", trans_a="R", trans_b="C", out=out, **BOTH)


@pytest.mark.parametrize("dtype", ["complex64", "float64"])
def test_beta_zero_never_reads_c(machine, dtype):
    a, b = random(1, dtype, 20, 12), random(2, dtype, 12, 10)
    assert np.isfinite(check(machine, a, b, np.full((20, 10), np.nan, dtype)[:, :], beta=0)).all()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_non_finite_values_stay_in_their_rows_and_columns(machine, dtype):
    a, b = random(1, dtype, 41, 9), random(2, dtype, 9, 38)
    a[3, 4], a[5, 0], b[8, 7], b[2, 17] = np.nan, np.inf, -np.inf, np.nan
    _, result = run(machine, a, b)
    with np.errstate(all="ignore"):
        expected = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(result), np.isnan(expected))
    np.testing.assert_array_equal(result[np.isinf(expected)], expected[np.isinf(expected)].astype(dtype))


def test_complex_infinities_follow_the_four_products(machine):
    a, b = random(1, "complex64", 9, 5), random(2, "complex64", 5, 10)
    a[2, 1], b[3, 4] = complex(np.inf, 1), complex(0, np.nan)
    _, result = run(machine, a, b)
    with np.errstate(all="ignore"):
        wide = [part.astype(np.float64) for part in (a.real, a.imag, b.real, b.imag)]
        parts = wide[0] @ wide[2] - wide[1] @ wide[3], wide[0] @ wide[3] + wide[1] @ wide[2]
    for got, expected in zip((result.real, result.imag), parts, strict=True):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
        np.testing.assert_array_equal(got[np.isinf(expected)], expected[np.isinf(expected)])


def test_float16_keeps_subnormals_where_the_device_would_not():
    """gfx90a multiplies float16 as float32, since its float16 instruction takes subnormal numbers for zero."""
    a = np.array([[2.0**-14, 0], [2.0**-24, 0], [60000, 60000]], np.float16)
    b = np.array([[1, 2.0**-10, 0.75], [1, 0, 0]], np.float16)
    with np.errstate(over="ignore"):
        expected = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float16)
    for spec in (MI300X, MI250X):
        _, result = run(ShimMachine(ShimLauncher(spec, optimize="-O1")), a, b)
        np.testing.assert_array_equal(result, expected)
    sources = [mfma.dense_arithmetic(GemmProblem.build(Operand.of(a), Operand.of(b)), s) for s in (MI300X, MI250X)]
    assert sources == ["fp16", "fp32"]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_thread_orders_do_not_matter(machine, order):
    a, b = random(1, "complex64", 37, 21), random(2, "complex64", 21, 70)
    other = ShimMachine(ShimLauncher(MI300X, order=order, optimize="-O1"))
    np.testing.assert_array_equal(run(other, a, b)[1], run(machine, a, b)[1])


@pytest.mark.parametrize("stages", [1, 2])
def test_every_access_is_inside_and_ordered(stages):
    """Bounds, races and reads of shared memory that nothing wrote."""
    machine = ShimMachine(ShimLauncher(MI300X, checked=True))
    config = dataclasses.replace(SMALL, stages=stages)
    check(machine, random(1, "float32", 33, 50), random(2, "float32", 50, 70), config=config)
    check(machine, strided(random(1, "float16", 64, 64), "fortran"), random(2, "float16", 64, 72), config=config)


def test_fp64_of_single_precision(machine):
    a, b = random(1, "complex64", 33, 30), random(2, "complex64", 30, 9)
    check(machine, a, b, compute="fp64", config=SMALL_DOUBLE)


# ---- arithmetic with roundings of its own: the model's bits


def test_the_models_bits_of_float16(machine):
    a, b = random(1, "float16", 35, 77), random(2, "float16", 77, 33, scale=2.0**-13)
    _, result = run(machine, a, b)
    np.testing.assert_array_equal(result, model.product_fp16(a, b).astype(np.float16))


def test_the_models_bits_of_xf32(machine):
    a, b = random(1, "float32", 35, 77), random(2, "float32", 77, 33)
    problem, result = run(machine, a, b, compute="tf32")
    np.testing.assert_array_equal(result, model.product_xf32(a, b))
    assert_within(result, reference.oracle_gemm(problem, a, b, None), reference.bound(problem, a, b, None))


def test_tf32_of_what_is_not_finite_or_nearly(machine):
    largest, least = np.finfo(np.float32).max, np.float32(2.0**-149)
    a = np.diag([np.inf, -np.inf, np.nan, largest, -largest, least, 1 + 2**-11, 1 + 3 * 2**-11]).astype(np.float32)
    a.view(np.uint32)[2, 2] = 0x7F800001  # NaN only by a bit that TF32 drops
    _, result = run(machine, a, np.full((8, 1), 1, np.float32), compute="tf32")
    with np.errstate(invalid="ignore"):
        plain = a @ np.ones((8, 1), np.float32)
    np.testing.assert_array_equal(np.isnan(result), np.isnan(plain))
    np.testing.assert_array_equal(np.isinf(result), np.isinf(plain))
    rounded = model.nearest_tf32(np.diag(a))
    np.testing.assert_array_equal(np.isfinite(rounded), np.isfinite(np.diag(a)))
    assert rounded[5] > 0
    np.testing.assert_array_equal(rounded[[3, 6, 7]], np.float32([2.0**127 * (2 - 2**-10), 1, 1 + 2**-9]))


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "gfx1100"])
@pytest.mark.parametrize("k", [64, 512, 2048])
def test_float16_is_no_less_accurate_than_a_chain_in_float32(k, arch):
    a, b = np.abs(random(1, "float16", 12, k)), np.abs(random(2, "float16", k, 12))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    plain = np.zeros((12, 12), np.float32)
    for x, y in zip(a.T.astype(np.float32), b.astype(np.float32), strict=True):
        plain += np.outer(x, y)
    assert np.linalg.norm(model.product_fp16(a, b, arch) - exact) <= np.linalg.norm(plain - exact)
