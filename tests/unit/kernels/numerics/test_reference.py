"""The oracle against exact arithmetic, the metrics against hand-made errors, the bound against real results."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from host_products import array, join, products
from hypothesis import given, settings

from gemmserve_kernels import GemmProblem, GemmReduceProblem, Operand, gemm, gemm_reduce
from gemmserve_kernels.numerics.reference import (
    Errors,
    bound,
    errors,
    oracle_gemm,
    oracle_gemm_reduce,
    reduction_errors,
)

EXTENDED = np.finfo(np.longdouble).nmant > np.finfo(np.float64).nmant


@pytest.fixture
def rng():
    return np.random.default_rng(1)


def build(a, b, c=None, **options):
    return GemmProblem.build(Operand.of(a), Operand.of(b), Operand.of(c) if c is not None else None, **options)


def exact(a, b):
    """Row 0 times column 0 in rational arithmetic: real and imaginary part."""
    left = [(Fraction(float(x.real)), Fraction(float(x.imag))) for x in a[0]]
    right = [(Fraction(float(x.real)), Fraction(float(x.imag))) for x in b[:, 0]]
    pairs = list(zip(left, right, strict=True))
    return sum(x[0] * y[0] - x[1] * y[1] for x, y in pairs), sum(x[0] * y[1] + x[1] * y[0] for x, y in pairs)


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_the_double_oracle_is_exact(rng, dtype, graded):
    """Also where the columns of A shrink over 600 binades as the rows of B grow."""
    a, b = array(rng, (3, 200), dtype), array(rng, (200, 4), dtype)
    if graded:
        scale = np.ldexp(1.0, np.linspace(0, 200, 200).astype(int))
        a, b = a / scale, b * scale[:, None]
    d = oracle_gemm(build(a, b), a, b)
    unit = float(np.finfo(np.longdouble).eps if EXTENDED else np.finfo(float).eps)
    for found, part in zip((d[0, 0].real, d[0, 0].imag), exact(a.astype(complex), b.astype(complex)), strict=True):
        high = float(found)
        value = Fraction(high) + Fraction(float(found - np.longdouble(high)))
        assert abs(value - part) <= 4 * unit * abs(part)


def test_the_double_oracle_keeps_non_finite_rows_apart(rng):
    a, b = array(rng, (4, 9), "c16"), array(rng, (9, 5), "c16")
    a[2, 3] = np.inf
    d = oracle_gemm(build(a, b), a, b)
    assert np.isfinite(d[[0, 1, 3]]).all()
    assert not np.isfinite(d[2]).any()


@settings(max_examples=150)
@given(products())
def test_the_oracle_computes_the_problem(drawn):
    problem = build(drawn.a, drawn.b, drawn.c, **drawn.options)
    found = oracle_gemm(problem, drawn.a, drawn.b, drawn.c)
    assert np.allclose(found.astype(drawn.expected.dtype), drawn.expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=300)
@given(products())
def test_results_obey_the_a_priori_bound(drawn):
    problem = build(drawn.a, drawn.b, drawn.c, **drawn.options)
    d = gemm(drawn.a, drawn.b, drawn.c, **drawn.options)
    difference = (join(d) if drawn.planar else d) - oracle_gemm(problem, drawn.a, drawn.b, drawn.c)
    limit = bound(problem, drawn.a, drawn.b, drawn.c)
    assert (np.abs(difference.real) <= limit).all()
    assert (np.abs(difference.imag) <= limit).all()


def test_the_bound_is_no_blank_cheque(rng):
    """It allows the rounding of 100 terms and not one wrong term."""
    a, b = array(rng, (10, 100), "f4"), array(rng, (100, 10), "f4")
    problem = build(a, b)
    wrong = a.copy()
    wrong[3, 50] += 0.01
    difference = np.abs(gemm(wrong, b) - oracle_gemm(problem, a, b))
    assert (difference > bound(problem, a, b))[3].sum() > 5


def test_errors_by_hand():
    reference = np.array([[3 + 4j, 0], [0, 100j]])
    d = reference + np.array([[0.5, 0], [0, 0]])
    found = errors(d, reference)
    norm = np.sqrt(25 + 1e4)
    assert found == Errors(
        pytest.approx(0.5 / norm), pytest.approx(0.1), pytest.approx(0.5 / 3), pytest.approx(0.0)
    )  # fmt: skip
    assert errors(reference, reference) == Errors(0, 0, 0, 0)


def test_errors_of_real_data_and_of_nothing():
    reference = np.array([[1.0, 2.0], [0.0, 0.0]])
    assert errors(reference, reference) == Errors(0, 0, 0, 0)
    assert errors(reference + np.array([[0, 0], [0, 1e-9]]), reference).worst_row == np.inf
    assert errors(np.empty((0, 3)), np.empty((0, 3))) == Errors(0, 0, 0, 0)


def test_nan_never_passes():
    found = errors(np.array([[np.nan, 1.0]]), np.array([[1.0, 1.0]]))
    assert not found.rel_fro <= 1
    with pytest.raises(ValueError, match="shape"):
        errors(np.zeros((2, 3)), np.zeros((3, 2)))


def test_errors_of_planar_reductions(rng):
    a, b = array(rng, (2, 3, 40, 20), "f4"), array(rng, (2, 20, 30), "f4")
    options = {"reduce": ["sum", "sumsq", "absmax", "argmin"], "layout": "planar", "return_c": True}
    problem = GemmReduceProblem.build(Operand.of(a), Operand.of(b), **options)
    found = reduction_errors(problem, a, b, gemm_reduce(a, b, **options))
    assert set(found) == {"sum", "sumsq", "absmax", "argmin", "c"}
    assert all(error < 1e-6 for error in found.values())


def test_oracle_of_reductions_returns_c(rng):
    a, b = array(rng, (4, 3), "f8"), array(rng, (3, 2), "f8")
    problem = GemmReduceProblem.build(Operand.of(a), Operand.of(b), reduce="max", return_c=True)
    found = oracle_gemm_reduce(problem, a, b)
    assert np.allclose(found["c"].astype(float), a @ b)
    assert np.array_equal(found["max"], found["c"].max(0))
