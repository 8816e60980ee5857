"""The oracle against exact arithmetic, the metrics against hand-made errors, the bound against real results."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from host_products import array, join, products
from hypothesis import given, settings

from gemmserve_kernels import GemmProblem, GemmReduceProblem, Operand, gemm, gemm_reduce
from gemmserve_kernels.device.interruption import interruptible
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.numerics.reference import (
    Errors,
    bound,
    errors,
    freivalds,
    oracle_gemm,
    oracle_gemm_reduce,
    reduction_errors,
    sampled_reduction_errors,
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


@pytest.mark.parametrize("layout", ["interleaved", "planar"])
def test_freivalds_estimates_the_error(rng, layout):
    planar = layout == "planar"
    shape = (2,) if planar else ()
    dtype = "f4" if planar else "c8"
    a, b, c = (array(rng, (*shape, 5, *size), dtype) for size in ((90, 80), (90, 70), (80, 70)))
    options = {"trans_a": "C", "alpha": 1 - 2j, "beta": 0.5j, "layout": layout}
    problem = build(a, b, c, **options)
    d = gemm(a, b, c, **options)
    residual = freivalds(problem, a, b, c, d, np.random.default_rng(0))
    actual = errors(join(d) if planar else d, oracle_gemm(problem, a, b, c)).rel_fro
    assert actual / 3 < residual < actual * 3
    d[..., 3, 17, 5] += 10
    assert freivalds(problem, a, b, c, d, np.random.default_rng(0)) > 1e-3


@pytest.mark.parametrize("shape", [(20, 1), (1, 15), (1, 1), (2, 1, 15), (2, 20, 1)])
@pytest.mark.parametrize("k", [0, 1, 9])
def test_freivalds_with_a_broadcast_c_and_short_sums(rng, shape, k):
    a, b, c = rng.standard_normal((2, 20, k)), rng.standard_normal((k, 15)), rng.standard_normal(shape)
    problem = build(a, b, c, beta=2)
    d = gemm(a, b, c, beta=2)
    assert freivalds(problem, a, b, c, d, np.random.default_rng(0)) < 1e-14
    d[1, 3, 4] += 1
    assert freivalds(problem, a, b, c, d, np.random.default_rng(0)) > 1e-3


def test_freivalds_of_nothing():
    a, b = np.empty((0, 3), "f4"), np.empty((3, 2), "f4")
    assert freivalds(build(a, b), a, b, None, gemm(a, b), np.random.default_rng(0)) == 0


@pytest.mark.parametrize("axis", ["m", "n", ["m", "batch"], ["n", "batch"]])
def test_errors_of_reductions(rng, axis):
    a, b = array(rng, (3, 40, 20), "c8"), array(rng, (20, 30), "c8")
    names = ["sum", "mean", "sumsq", "absmax", "argmax", "argmin"]
    problem = GemmReduceProblem.build(Operand.of(a), Operand.of(b), reduce=names, axis=axis)
    results = gemm_reduce(a, b, reduce=names, axis=axis)
    for found in (
        reduction_errors(problem, a, b, results),
        sampled_reduction_errors(problem, a, b, results, rng, outputs=4),
    ):
        assert list(found) == names
        assert all(error < 1e-5 for error in found.values())
    results["argmax"] = results["argmin"]
    results["sum"] = results["sum"] * 1.01
    found = sampled_reduction_errors(problem, a, b, results, rng, outputs=4)
    assert found["argmax"] > 0.1
    assert found["sum"] == pytest.approx(0.01, rel=1e-3)


NAMES = ["sum", "mean", "sumsq", "absmax", "absmin", "argmax", "argmin"]


@pytest.mark.parametrize("at_once", [30, 400, 1 << 19])
@pytest.mark.parametrize("axis", ["m", "n", ["m", "batch"], ["n", "batch"]])
@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((3, 40, 5), (5, 30)), {}),
        (((40, 5), (2, 3, 5, 30)), {"alpha": 2 - 1j}),
        (((2, 1, 5, 40), (3, 30, 5)), {"trans_a": "C", "trans_b": "T"}),
        (((2, 3, 40, 5), (2, 5, 30)), {"layout": "planar", "trans_b": "R"}),
        (((9, 1), (1, 1)), {"pre_op": "square"}),
    ],
    ids=["broadcast", "alpha", "trans", "planar", "small"],
)
@pytest.mark.parametrize("dtype", ["c8", "f8"])
def test_errors_of_reductions_in_parts_are_those_of_the_whole(rng, shapes, axis, options, at_once, dtype, monkeypatch):
    for most in ("_SAMPLED", "_SAMPLED_EXACTLY"):
        monkeypatch.setattr(reference, most, at_once)
    planar = options.get("layout") == "planar"
    if dtype == "f8":
        options = {name: value for name, value in options.items() if name != "alpha"}
    a, b = (array(rng, shape, "f4" if planar and dtype == "c8" else dtype) for shape in shapes)
    options = {"reduce": NAMES, "axis": axis, **options}
    problem = GemmReduceProblem.build(Operand.of(a), Operand.of(b), **options)
    results = gemm_reduce(a, b, **options)
    for wrong in (False, True):
        if wrong:
            results = {
                name: result[..., ::-1] * (1 if name.startswith("arg") else 1.5) for name, result in results.items()
            }
        whole = reduction_errors(problem, a, b, results)
        parts = sampled_reduction_errors(problem, a, b, results, rng, outputs=1000)
        assert list(parts) == NAMES
        for name in NAMES:
            assert parts[name] == pytest.approx(whole[name], rel=1e-6, abs=1e-12), name


def test_an_index_that_points_nowhere_is_no_number(rng):
    a, b = array(rng, (40, 5), "f4"), array(rng, (5, 3), "f4")
    problem = GemmReduceProblem.build(Operand.of(a), Operand.of(b), reduce="argmax")
    for nowhere in (-1, 40, 1 << 40):
        found = sampled_reduction_errors(problem, a, b, {"argmax": np.array([0, nowhere, 0])}, rng)
        assert np.isnan(found["argmax"])


@pytest.mark.parametrize("shapes", [((1 << 16, 8), (8, 4)), ((1 << 12, 16, 8), (8, 4)), ((4, 8), (1 << 12, 8, 16))])
def test_a_check_of_a_long_reduction_can_be_interrupted(rng, shapes, monkeypatch):
    """Eight million rows took three seconds, and nobody was asked."""
    monkeypatch.setattr(reference, "_SAMPLED", 1 << 12)
    a, b = (array(rng, shape, "f4") for shape in shapes)
    axis = ["m", "batch"] if a.shape[-2] > 4 else ["n", "batch"]
    problem = GemmReduceProblem.build(Operand.of(a), Operand.of(b), reduce=["sum", "argmax"], axis=axis)
    results = gemm_reduce(a, b, reduce=["sum", "argmax"], axis=axis)
    asked = []
    with interruptible(lambda: asked.append(None)):
        assert max(sampled_reduction_errors(problem, a, b, results, rng).values()) < 1e-4
    assert len(asked) >= (1 << 16) * 8 // (1 << 12)


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
