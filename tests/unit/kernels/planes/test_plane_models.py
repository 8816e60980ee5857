"""The models of products from planes: their error by kind of data and k, and what falls back."""

from __future__ import annotations

import numpy as np
import pytest
from simt_cases import random

from gemmserve_kernels import models
from gemmserve_kernels.planes import models as plane_models
from gemmserve_kernels.reference import errors

M, N = 24, 20


def power(k, *, shuffled=False):
    exponents = 40 * np.arange(k) / k
    return np.exp2(np.random.default_rng(9).permutation(exponents) if shuffled else exponents)


def operands(kind, k, dtype="complex64"):
    a, b = random(1, dtype, M, k), random(2, dtype, k, N)
    rng = np.random.default_rng(3)
    if kind == "positive":
        a, b = (np.abs(x.real) + (1j * np.abs(x.imag) if x.dtype.kind == "c" else 0) for x in (a, b))
    elif kind == "wide":
        a, b = (x / np.abs(x) * np.exp2(rng.uniform(-12, 12, x.shape)) for x in (a, b))
    elif kind.startswith("graded"):
        scale = power(k, shuffled=kind.endswith("shuffled"))
        a, b = a * scale, b / scale[:, None]
    elif kind == "ill-scaled":
        a, b = a * np.exp2(rng.integers(-30, 30, (M, 1))), b * np.exp2(rng.integers(-30, 30, (1, N)))
    elif kind == "one-hot":
        a = np.zeros((M, k))
        a[np.arange(M), rng.permutation(k)[:M]] = 1
    elif kind == "diagonal, graded":
        a = np.zeros((M, k))
        a[np.arange(M), np.arange(M)] = np.exp2(np.arange(M))
        b = b.copy()
        b[:M] *= np.exp2(-np.arange(M))[:, None]
    elif kind == "constant":
        a, b = np.full((M, k), 0.7), np.full((k, N), 1.3)
    elif kind == "subnormal":
        a = a * 1e-41
    elif kind == "huge":
        a, b = a * 2e37, b * 1e-3
    elif kind == "faint imaginary":
        a, b = (x.real + 2.0**-20 * 1j * x.imag for x in (a, b))
    elif kind == "spike":
        a = a.copy()
        a[:, k // 3] *= 2.0**30
    return a.astype(dtype), b.astype(dtype)


KINDS = [
    "normal",
    "positive",
    "wide",
    "graded",
    "graded shuffled",
    "ill-scaled",
    "one-hot",
    "diagonal, graded",
    "constant",
    "subnormal",
    "huge",
]
NEVER = {"normal", "positive", "wide", "graded", "graded shuffled", "one-hot", "constant", "huge"}


def like_cublas(a, b, slices=4):
    """Plain float32 as a BLAS has it at its best here: fused multiply-adds in the order of k, k cut into `slices`.

    (cuBLAS on an H200, data of one sign, 1024 x 1024 x 4096: real part 8.2e-7, imaginary part 3.0e-7; this: 8.3e-7 and
    3.1e-7.)
    """
    k = a.shape[1] // slices

    def total(pairs):
        sums = np.zeros((slices, len(a), b.shape[1]), np.float32)
        cut = [(x.T.reshape(slices, k, -1).astype(float), y.reshape(slices, k, -1).astype(float)) for x, y in pairs]
        for step in range(k):
            for x, y in cut:
                sums = (sums + x[:, step, :, None] * y[:, step, None, :]).astype(np.float32)
        return sum(sums[1:], sums[0])

    if a.dtype.kind != "c":
        return total([(a, b)])
    return total([(a.real, b.real), (-a.imag, b.imag)]) + 1j * total([(a.real, b.imag), (a.imag, b.real)])


CASES = [(kind, k) for k in (512, 4096) for kind in KINDS] + [("normal", 16384), ("positive", 16384)]
EXACT = {"one-hot", "diagonal, graded", "constant", "subnormal"}
"""Where float32 is exact, or nearly so, or rounds to subnormals: what the planes cannot hold may show."""


@pytest.mark.parametrize(("kind", "k"), CASES)
@pytest.mark.parametrize("dtype", ["complex64", "float32"])
def test_each_part_is_accurate(kind, k, dtype):
    a, b = operands(kind, k, dtype)
    d, flagged = plane_models.product(a, b, "3xfp16")
    wide, plain = a.astype(complex) @ b.astype(complex), like_cublas(a, b)
    if kind == "ill-scaled":  # or a few large rows and columns are all that is compared
        size = np.outer(*(np.exp2(np.frexp(np.abs(x).max(axis=axis))[1].astype(float)) for x, axis in ((a, 1), (b, 0))))
        d, wide, plain = d / size, wide / size, plain / size
    found, rival = errors(d, wide), errors(plain, wide)
    assert found.rel_fro <= max(5e-7, rival.rel_fro if kind in EXACT else 0)
    least = 5e-7 if kind in EXACT else 0
    for ours, theirs in ((found.rel_real, rival.rel_real), (found.rel_imag, rival.rel_imag)):
        assert ours <= max(least, 1.1 * theirs)
    if kind in NEVER:
        assert not flagged.any()


@pytest.mark.parametrize("k", [512, 4096])
@pytest.mark.parametrize("dtype", ["complex64", "float32"])
def test_mma_sync_is_as_accurate(k, dtype):
    for kind in ("normal", "positive"):
        a, b = operands(kind, k, dtype)
        wide = a.astype(complex) @ b.astype(complex)
        found = errors(plane_models.product(a, b, "3xfp16", kernel="mma")[0], wide)
        plain = errors(like_cublas(a, b), wide)
        assert found.rel_real <= plain.rel_real
        assert found.rel_imag <= plain.rel_imag


def test_parts_that_take_turns_are_what_makes_a_real_part_that_cancels_accurate():
    """The same order in every sum: truncation takes the same from each, and the real part shows it."""
    a, b = operands("positive", 8192)
    wide = a.astype(complex) @ b.astype(complex)
    columns = np.ascontiguousarray(b.T)
    left, right = plane_models.split(a, "3xfp16", "a"), plane_models.split(columns, "3xfp16", "b")
    parts = plane_models._complex_wgmma(left.planes.astype(np.float32), right.planes.astype(np.float32).swapaxes(1, 2))
    scale = np.exp2(np.add.outer(left.exponents, right.exponents).astype(float))
    found = []
    for turns in (parts[0], parts[0][:1]):
        real = models.promoted(turns, 8192, 64, models.HOPPER.fp16, models.HOPPER) * scale
        found.append(np.linalg.norm(real - wide.real) / np.linalg.norm(wide.real))
    turning, same = found
    assert same > 2 * turning
    assert turning < errors(like_cublas(a, b), wide).rel_real


@pytest.mark.parametrize("kind", ["faint imaginary", "spike", "diagonal, graded"])
def test_what_would_be_lost_falls_back(kind):
    a, b = operands(kind, 4096)
    assert plane_models.product(a, b, "3xfp16")[1].all()


def test_without_balancing_grading_would_be_lost(monkeypatch):
    a, b = operands("graded", 2048)
    wide = a.astype(complex) @ b.astype(complex)
    assert errors(plane_models.product(a, b, "3xfp16")[0], wide).rel_fro < 3e-7
    monkeypatch.setattr(plane_models, "balance", lambda _x, _y, left, right, _scheme: (left, right, False))
    assert errors(plane_models.product(a, b, "3xfp16")[0], wide).rel_fro > 1e-5


@pytest.mark.parametrize("kind", ["normal", "wide", "graded", "ill-scaled"])
def test_three_products_hold_in_norm(kind):
    a, b = operands(kind, 4096)
    d, _ = plane_models.product(a, b, "3xfp16-3m")
    assert errors(d, a.astype(complex) @ b.astype(complex)).rel_fro < 5e-7


@pytest.mark.parametrize("dtype", ["complex64", "float32"])
def test_one_product_has_the_error_of_tf32(dtype):
    a, b = operands("normal", 1024, dtype)
    d, flagged = plane_models.product(a, b, "1xfp16")
    assert 1e-4 < errors(d, a.astype(complex) @ b.astype(complex)).rel_fro < 4e-4
    assert not flagged.any()


def test_rows_and_columns_that_are_not_finite_are_plain():
    a, b = operands("normal", 256)
    a[3, 5], b[7, 2] = np.nan, np.inf
    d, flagged = plane_models.product(a, b, "3xfp16")
    expected = np.zeros((M, N), bool)
    expected[3], expected[:, 2] = True, True
    np.testing.assert_array_equal(flagged, expected)
    assert np.isfinite(d[~expected]).all()


def test_zeros():
    a, b = operands("normal", 128)
    a[:, 5:], b[:, 3] = 0, 0
    d, flagged = plane_models.product(a, b, "3xfp16")
    assert not flagged.any()
    assert errors(d, a.astype(complex) @ b.astype(complex)).rel_fro < 3e-7
