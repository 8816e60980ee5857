"""The mma.sync kernel on the device against the double-precision oracle: every mode, layout, edge and kind of data."""

from __future__ import annotations

import numpy as np
import pytest
from framed import Framed
from mma_cases import BOUNDS, build, check, check_not_finite, check_planes, planes_of, run
from simt_cases import CupyMachine, random, strided

from gemmserve_kernels.algorithms.mma import gemm as mma
from gemmserve_kernels.algorithms.mma import plan
from gemmserve_kernels.algorithms.mma.tile import check_device
from gemmserve_kernels.device.launch import CupyLauncher
from gemmserve_kernels.numerics import models, reference
from gemmserve_kernels.problem.config import GemmConfig

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def machine():
    launcher = CupyLauncher.current()
    if reason := check_device(launcher.spec):
        pytest.skip(reason)
    return CupyMachine(launcher)


SHAPES = [(1, 1, 1), (70, 33, 45), (64, 64, 64), (200, 130, 96), (129, 257, 1000), (3, 500, 7)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("compute", ["3xtf32", "1xtf32"])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_shapes(machine, dtype, compute, shape):
    m, n, k = shape
    check(machine, compute, random(1, dtype, m, k), random(2, dtype, k, n), factor=4 if k < 50 else 1)


@pytest.mark.parametrize("trans", ["NT", "TN", "CC", "RT", "TR", "NC"])
@pytest.mark.parametrize("order", "CF")
def test_operations(machine, trans, order):
    m, n, k = 100, 68, 72
    a = random(1, "c8", *((k, m) if trans[0] in "TC" else (m, k)))
    b = random(2, "c8", *((n, k) if trans[1] in "TC" else (k, n)))
    options = {"trans_a": trans[0], "trans_b": trans[1], "alpha": 2 - 1j, "beta": 0.5j}
    check(machine, "3xtf32", a, b, random(3, "c8", m, n), order=order, **options)


@pytest.mark.parametrize("how", ["fortran", "reversed", "gaps"])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_strides(machine, dtype, how):
    a, b, c = (strided(random(i, dtype, *shape), how) for i, shape in enumerate([(65, 70), (70, 90), (65, 90)]))
    check(machine, "3xtf32", a, b, c, beta=-1)


def test_one_element_off_alignment(machine):
    a = random(1, "f4", 80 * 64 + 1)[1:].reshape(80, 64)
    b = random(2, "f4", 64 * 80 + 1)[1:].reshape(64, 80)
    aligned = check(machine, "3xtf32", a.copy(), b.copy())
    np.testing.assert_array_equal(check(machine, "3xtf32", a, b), aligned)


def test_planar(machine):
    a, b, c = (random(i, "f4", 2, *shape) for i, shape in enumerate([(65, 70), (70, 90), (65, 90)]))
    check(machine, "3xtf32", a, b, c, layout="planar", alpha=1j, beta=2, trans_a="R")


@pytest.mark.parametrize("split_k", [1, 3])
def test_batches_have_the_bits_of_their_products(machine, split_k):
    config = GemmConfig(split_k=split_k)
    a, b = random(1, "c8", 3, 1, 70, 400), random(2, "c8", 2, 400, 50)
    both = check(machine, "3xtf32", a, b, config=config)
    for index in np.ndindex(3, 2):
        alone = check(machine, "3xtf32", a[index[0], 0], b[index[1]], config=config)
        np.testing.assert_array_equal(both[index], alone)


def test_splits_in_turns(machine, monkeypatch):
    a, b = random(1, "c8", 200, 700), random(2, "c8", 700, 190)
    config = GemmConfig(split_k=4)
    _, whole = run(machine, "3xtf32", a, b, config=config)
    monkeypatch.setattr(plan, "_WORKSPACE_BYTES", 1 << 18)
    _, turns = run(machine, "3xtf32", a, b, config=config)
    np.testing.assert_array_equal(whole, turns)


@pytest.mark.parametrize("compute", ["3xtf32", "1xtf32"])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_the_same_bits_every_time(machine, dtype, compute):
    a, b = random(1, dtype, 300, 520), random(2, dtype, 520, 260)
    results = [run(machine, compute, a, b)[1] for _ in range(5)]
    for again in results[1:]:
        np.testing.assert_array_equal(results[0], again)


@pytest.mark.parametrize("style", models.ROUNDINGS)
def test_the_big_part_is_the_models(machine, style):
    """A product with the identity in one pass gives the operand's TF32: `1xtf32` rounds by `rounding_small`."""
    rng = np.random.default_rng(1)
    a = rng.integers(0, 2**32, (64, 64), dtype=np.uint32).view(np.float32)
    a[~np.isfinite(a) | (np.abs(a) < 1e-37) | (np.abs(a) > 1e38)] = 1 + 2**-11
    _, result = run(machine, "1xtf32", a, np.eye(64, dtype=np.float32), config=GemmConfig(rounding_small=style))
    np.testing.assert_array_equal(result.view(np.uint32), models.round_tf32(a, style).view(np.uint32))


@pytest.mark.parametrize("big", models.ROUNDINGS)
@pytest.mark.parametrize("small", models.ROUNDINGS)
def test_big_and_small_are_the_models(machine, big, small):
    """The identity is its own big part: the result is big + small, which round together only in the last step."""
    a = random(3, "f4", 64, 64)
    config = GemmConfig(rounding_big=big, rounding_small=small)
    _, result = run(machine, "3xtf32", a, np.eye(64, dtype=np.float32), config=config)
    high = models.round_tf32(a, big)
    low = models.round_tf32(a - high, small)
    exact = high.astype(np.float64) + low
    assert (np.abs(result - exact) <= np.spacing(np.abs(result))).all()
    assert np.abs(result - a).max() <= 2.0**-20 * np.abs(a).max()


@pytest.mark.parametrize("compute", ["3xtf32", "1xtf32"])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_what_is_not_finite_comes_out_as_in_plain_float32(machine, dtype, compute):
    check_not_finite(machine, dtype, compute)


def test_c_is_not_read_where_beta_is_zero(machine):
    a, b = random(1, "c8", 40, 50), random(2, "c8", 50, 60)
    _, result = run(machine, "3xtf32", a, b, np.full((40, 60), np.nan, np.complex64), beta=0)
    assert np.isfinite(result).all()


@pytest.mark.parametrize("scheme", ["3xfp16", "1xfp16"])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("order", "CF")
def test_planes(machine, dtype, scheme, order):
    check_planes(machine, dtype, scheme, order)


def test_within_the_models_bound_at_the_headline(machine):
    import cupy

    m, n, k = 3456, 4096, 4096
    rng = cupy.random.default_rng(4)
    a, b = ((rng.standard_normal(s) + 1j * rng.standard_normal(s)).astype("c8") for s in [(m, k), (k, n)])
    problem = build(a, b, compute="3xtf32")
    out = cupy.full((m, n), cupy.nan, "c8")
    mma.run_gemm(machine.launcher, problem, None, a, b, None, out)
    exact = a[:256].astype("c16") @ b.astype("c16")
    error = float(cupy.linalg.norm(out[:256] - exact) / cupy.linalg.norm(exact))
    assert error <= BOUNDS["3xtf32"]
    few = slice(0, 32)
    model = models.product(a[few].get(), b[:, few].get(), "3xtf32")
    small = exact[few, few].get()
    assert error <= 1.5 * np.linalg.norm(model - small) / np.linalg.norm(small)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(65, 67, 300), (64, 64, 32), (1, 300, 9), (300, 1, 9)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_nothing_is_written_beside_the_result(machine, dtype, shape, order):
    """Everything begins one element off any alignment; C is the result's own place; k is split and is not."""
    m, n, k = shape
    shapes = [(2, m, k), (1, k, n), (2, m, n)]
    a, b, c = (random(i, dtype, *each) for i, each in enumerate(shapes))
    held = [Framed(x.shape, dtype).fill(x) for x in (a, b)]
    problem = build(a, b, c, compute="3xtf32", alpha=2, beta=-1)
    for config in (None, GemmConfig(split_k=2)):
        out = Framed((2, m, n), dtype, order=order).fill(c)
        mma.run_gemm(machine.launcher, problem, config, *(x.array for x in held), out.array, out.array)
        found = reference.errors(out.get(), reference.oracle_gemm(problem, a, b, c))
        assert found.rel_fro <= (4 if k < 50 else 1) * BOUNDS["3xtf32"]


def test_operands_without_a_stride_of_their_own(machine):
    row, column = random(1, "c8", 1, 70), random(2, "c8", 70, 1)
    a, b = np.broadcast_to(row, (65, 70)), np.broadcast_to(column, (70, 66))
    check(machine, "3xtf32", a, b, factor=4)


def test_a_batch_of_more_than_65535(machine):
    check(machine, "3xtf32", random(1, "f4", 70_000, 3, 5), random(2, "f4", 70_000, 5, 4), factor=4)


def test_results_and_operands_of_more_than_two_to_the_31_elements(machine):
    import cupy

    long, n = 1 << 21, 1032
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 2.2 * long * n * 4:
        pytest.skip(f"{free} bytes free on the device")
    rng = cupy.random.default_rng(3)
    tall, wide = (rng.standard_normal(shape, dtype=cupy.float32) for shape in [(long, 8), (8, n)])
    problem = build(tall, wide, compute="3xtf32")
    out = cupy.full((long, n), cupy.nan, cupy.float32)
    mma.run_gemm(machine.launcher, problem, None, tall, wide, None, out)
    narrow = rng.standard_normal((n, 8), dtype=cupy.float32)
    back = cupy.full((long, 8), cupy.nan, cupy.float32)
    mma.run_gemm(machine.launcher, build(out, narrow, compute="3xtf32"), None, out, narrow, None, back)
    for first in (0, long // 2, long - 64):
        here = slice(first, first + 64)
        exact = tall[here].astype("f8") @ wide.astype("f8")
        assert float(cupy.linalg.norm(out[here] - exact) / cupy.linalg.norm(exact)) <= 4 * BOUNDS["3xtf32"]
        exact = out[here].astype("f8") @ narrow.astype("f8")
        assert float(cupy.linalg.norm(back[here] - exact) / cupy.linalg.norm(exact)) <= BOUNDS["3xtf32"]


@pytest.mark.parametrize("k", [512, 4096])
@pytest.mark.parametrize("kind", ["normal", "positive"])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_each_part_of_planes_is_as_accurate_as_the_vendors_float32(machine, dtype, kind, k):
    import cupy

    a, b = random(1, dtype, 1, 512, k), random(2, dtype, 1, 512, k)
    if kind == "positive":
        a, b = ((np.abs(x.real) + (1j * np.abs(x.imag) if x.dtype.kind == "c" else 0)).astype(dtype) for x in (a, b))
    left, right = (planes_of(machine, x, "3xfp16", side) for x, side in ((a, "a"), (b, "b")))
    problem = build(a[0], b[0].T, compute="auto")
    tile = mma.resolve_planes(None, problem, "3xfp16", machine.launcher.spec)
    out = cupy.full((512, 512), cupy.nan, dtype)
    mma.multiply(machine.launcher, problem, tile, left, right, None, out)
    expected = a[0].astype("c16") @ b[0].T.astype("c16")
    expected = expected if dtype == "complex64" else expected.real
    found = reference.errors(out, expected)
    vendor = reference.errors(cupy.matmul(cupy.asarray(a[0]), cupy.asarray(b[0].T)), expected)
    slack = 1.15 if kind == "positive" else 1.0
    assert found.rel_real <= slack * vendor.rel_real, (found, vendor)
    assert found.rel_imag <= slack * vendor.rel_imag, (found, vendor)
