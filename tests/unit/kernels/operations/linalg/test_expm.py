"""expm beside its own series in higher precision, every degree and many squarings."""

from __future__ import annotations

from fractions import Fraction
from math import comb, perm

import numpy as np
import pytest
from linalg_cases import DTYPES, adjoint, eps, op, random, run

from gemmserve_kernels.operations.linalg.expm import _BOUNDS, Expm, _coefficients


def series(a):
    """exp(a) by scaling and Taylor's series in extended precision."""
    wide = a.astype(np.clongdouble)
    norm = float(np.abs(wide).sum(-2).max(initial=0))
    halvings = max(0, int(np.ceil(np.log2(norm))) + 4) if norm else 0
    wide = wide / np.longdouble(2) ** halvings
    term = total = np.eye(a.shape[-1], dtype=np.clongdouble)
    for k in range(1, 30):
        term = term @ wide / k
        total = total + term
    for _ in range(halvings):
        total = total @ total
    return total


def norm(a):
    return np.abs(a).sum(-2).max(initial=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("trans", ["N", "T", "C", "R"])
def test_every_degree_and_squarings(dtype, trans):
    rng = np.random.default_rng(1)
    n = 9
    # Antihermitian: the exponential is unitary, well conditioned whatever the norm (Higham, Functions of Matrices, 3).
    a = random(rng, (2, 3, n, n), dtype)
    a = a - adjoint(a)
    norms = [1e-3, 0.1, 0.5, 1.5, 4, 40]
    for place, wanted in zip(np.ndindex(2, 3), norms, strict=True):
        a[place] *= wanted / norm(a[place])
    _, made, found = run(Expm, {"a": op(a, trans)}, trans_a=trans)
    assert made.dtype == dtype
    for place, wanted in zip(np.ndindex(2, 3), norms, strict=True):
        error = norm(made[place] - series(a[place]))
        assert error <= 8 * n * max(1, wanted) * eps(dtype), wanted
    assert np.isnan(found.residual)  # it is not checked, and does not say that it is


def test_a_matrix_is_alone_with_its_scaling():
    rng = np.random.default_rng(2)
    a = random(rng, (4, 5, 5), "f8") * np.array([1e-3, 1, 30, 0.2])[:, None, None]
    _, together, _ = run(Expm, {"a": a})
    for matrix, made in zip(a, together, strict=True):
        np.testing.assert_array_equal(run(Expm, {"a": matrix})[1], made)


def test_known_values():
    _, made, _ = run(Expm, {"a": np.array([[0.0, -np.pi], [np.pi, 0]])})
    np.testing.assert_allclose(made, -np.eye(2), atol=1e-15)
    _, made, _ = run(Expm, {"a": np.array([[0.0, 5], [0, 0]])})
    np.testing.assert_allclose(made, [[1, 5], [0, 1]], rtol=1e-15)
    assert run(Expm, {"a": np.zeros((3, 3), "c8")})[1].tolist() == np.eye(3).tolist()


@pytest.mark.parametrize("shape", [(0, 0), (0, 3, 3), (2, 0, 0)])
def test_nothing(shape):
    assert run(Expm, {"a": np.empty(shape)})[1].shape == shape


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e308])
def test_what_has_no_norm_is_nan_by_itself(value):
    a = np.zeros((2, 3, 3))
    a[0] = value
    _, made, _ = run(Expm, {"a": a})
    assert np.isnan(made[0]).all()
    assert made[1].tolist() == np.eye(3).tolist()


def test_a_norm_near_the_largest_number():
    _, made, _ = run(Expm, {"a": np.array([[-1e300, 0], [0, 0]])})
    np.testing.assert_allclose(made, [[0, 0], [0, 1]])


@pytest.mark.parametrize("digits", [8, 4])
def test_the_bounds_are_those_of_the_rule(digits):
    """theta_m: the norm whose backward error, |log(exp(-x) r(x)) / x|, is the unit roundoff (Higham 2005, 2.8)."""
    unit = 2.0**-53 if digits == 8 else 2.0**-24
    for degree, theta in _BOUNDS[digits].items():
        x = Fraction(theta)
        b = [Fraction(comb(degree, k), perm(2 * degree, k)) for k in range(degree + 1)]
        assert _coefficients(degree) == [float(each) for each in b]
        p, q = (sum(each * y**k for k, each in enumerate(b)) for y in (x, -x))
        term = total = Fraction(1)
        for k in range(1, 80):
            term *= -x / k
            total += term
        assert abs(float(p / q * total - 1)) / theta == pytest.approx(unit, rel=1e-6)
