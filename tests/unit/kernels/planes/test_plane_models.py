"""The models of products from planes: their error by kind of data and k, and what falls back."""

from __future__ import annotations

import numpy as np
import pytest
from simt_cases import random

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


@pytest.mark.parametrize("k", [512, 4096, 16384])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["complex64", "float32"])
def test_each_part_is_accurate(kind, k, dtype):
    a, b = operands(kind, k, dtype)
    d, flagged = plane_models.product(a, b, "3xfp16")
    wide = a.astype(complex) @ b.astype(complex)
    found = errors(d, wide)
    # A BLAS on the CPU sums in blocks, and is a stricter rival than one long sum; with data of one sign
    # truncation goes the same way every time (the real part of such a product cancels, and shows it).
    slack = 2.5 if kind in {"constant", "positive"} else 1
    plain = errors(a @ b, wide)
    for ours, theirs in ((found.rel_real, plain.rel_real), (found.rel_imag, plain.rel_imag)):
        assert ours <= max(5e-7, slack * theirs)
    if kind in NEVER:
        assert not flagged.any()


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
