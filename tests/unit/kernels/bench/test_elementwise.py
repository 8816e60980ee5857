"""Elementwise errors against exact rational arithmetic, and what follows of them for reductions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from accuracy_cases import DTYPES, argument_holds, hold_product, reduction_allowance
from hypothesis import given
from hypothesis import strategies as st

from gemmserve_kernels.bench import elementwise as module
from gemmserve_kernels.bench.elementwise import (
    elementwise,
    exact_product,
    limit,
    product_and_scale,
    slice_bits,
    slices,
    unit,
)
from gemmserve_kernels.bench.kinds import KINDS, operands


def rational(x):
    """Real and imaginary parts, exact."""
    return [[(Fraction(float(z.real)), Fraction(float(z.imag))) for z in row] for row in x.tolist()]


def root(x):
    """Return the root of a rational, to double precision, whatever its size."""
    if x == 0:
        return Fraction(0)
    shift = 2 * ((x.denominator.bit_length() - x.numerator.bit_length()) // 2 + 80)
    return Fraction(math.isqrt(int(x * Fraction(2) ** shift)), 1) / Fraction(2) ** (shift // 2)


def by_fractions(a, b, d):
    """The worst errors over (|A| |B|) in units of u: of the moduli, of the real and of the imaginary parts."""
    a, b, d, u = rational(a), rational(b), rational(d), Fraction(unit(d.dtype))
    worst = [Fraction(0)] * 3
    for i, row in enumerate(a):
        for j in range(len(b[0])):
            pairs = [(x, b[l][j]) for l, x in enumerate(row)]  # noqa: E741
            off_re = sum(x[0] * y[0] - x[1] * y[1] for x, y in pairs) - d[i][j][0]
            off_im = sum(x[0] * y[1] + x[1] * y[0] for x, y in pairs) - d[i][j][1]
            size_re = sum(abs(x[0] * y[0]) + abs(x[1] * y[1]) for x, y in pairs)
            size_im = sum(abs(x[0] * y[1]) + abs(x[1] * y[0]) for x, y in pairs)
            moduli = sum(root((x[0] ** 2 + x[1] ** 2) * (y[0] ** 2 + y[1] ** 2)) for x, y in pairs)
            found = [(root(off_re**2 + off_im**2), moduli), (abs(off_re), size_re), (abs(off_im), size_im)]
            worst = [max(w, x / y / u) if y else w for w, (x, y) in zip(worst, found, strict=True)]
    return [float(x) for x in worst]


ORDINARY = [kind for kind in KINDS if kind not in {"tiny", "subnormal"}]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ORDINARY)
def test_errors_are_those_of_exact_arithmetic(kind, dtype):
    a, b = operands(np, kind, 5, 4, 9, dtype, 3)
    with np.errstate(all="ignore"):
        plain = a @ b
        truncated = plain * np.dtype(dtype).type(1 - 8 * unit(dtype))
        truncated[2, 1] = plain[2, 1] + np.dtype(dtype).type(1e-3) * plain[2, 2]
    found = elementwise(np, a, b, {"plain": plain, "truncated": truncated})
    for name, d in (("plain", plain), ("truncated", truncated)):
        ours = found[name]
        expected = by_fractions(a, b, d)
        assert [ours.modulus, ours.real, ours.imag] == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert found["plain"].odd == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("panel", [1, 600, 5000])
def test_panels_do_not_matter(dtype, panel):
    a, b = operands(np, "exp-3n", 23, 17, 30, dtype, 4)
    d = a @ b
    d[19, 13] *= 1.5
    whole = elementwise(np, a, b, {"d": d})["d"]
    cut = elementwise(np, a, b, {"d": d}, panel_bytes=panel)["d"]
    assert whole.at == cut.at == (19, 13)
    assert [whole.modulus, whole.real, whole.imag] == pytest.approx([cut.modulus, cut.real, cut.imag], rel=1e-9)


@given(
    seed=st.integers(0, 2**32),
    k=st.integers(1, 40),
    spread=st.integers(0, 240),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
def test_the_exact_product_is_exact(seed, k, spread, shape):
    """Up to 240 binades in a row: (high + low) 2**exponent is the product to 2**-80 of |A| |B|."""
    rng = np.random.default_rng(seed)
    a, b = (
        np.ldexp(rng.standard_normal(size), rng.integers(-spread // 2, spread // 2 + 1, size))
        for size in ((shape[0], k), (k, shape[1]))
    )
    high, low, exponent = exact_product(np, a, b)
    for i, j in np.ndindex(*shape):
        terms = [Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a[i], b[:, j], strict=True)]
        found = (Fraction(float(high[i, j])) + Fraction(float(low[i, j]))) * Fraction(2) ** int(exponent[i, j])
        assert abs(found - sum(terms)) <= sum(map(abs, terms)) / Fraction(2) ** 80
        assert abs(low[i, j]) <= np.spacing(abs(high[i, j])) / 2


def test_slices_add_up_and_are_short():
    rng = np.random.default_rng(1)
    x = np.ldexp(rng.standard_normal((6, 50)), rng.integers(-60, 60, (6, 50)))
    for k in (2, 50, 16384):
        bits = slice_bits(k)
        assert 2 * bits + math.ceil(math.log2(k)) <= 53
        exponent, found = slices(np, x, bits, -1)
        total = [[sum(Fraction(float(s[i, l])) for s in found) for l in range(50)] for i in range(6)]  # noqa: E741
        for i, l in np.ndindex(6, 50):  # noqa: E741
            assert total[i][l] * Fraction(2) ** int(exponent[i, 0]) == Fraction(float(x[i, l]))
        for piece in found:
            quanta = np.ldexp(1.0, np.frexp(np.abs(piece).max(axis=1, keepdims=True))[1] - bits - 1)
            assert (piece / quanta == np.rint(piece / quanta)).all()
            assert (np.abs(piece) <= 2.0 ** (bits + 1) * quanta).all()
        assert (sum(np.abs(s) for s in found) <= 4 * np.abs(np.ldexp(x, -exponent))).all()


def test_what_exceeds_the_slices_is_rounded_and_not_lost(monkeypatch):
    monkeypatch.setattr(module, "MAX_SLICES", 2)
    a, b = operands(np, "60-binades", 8, 7, 20, "float64", 1)
    high, low, exponent = exact_product(np, a, b)
    np.testing.assert_allclose(np.ldexp(high + low, exponent), a @ b, rtol=1e-9)


def test_nothing_to_multiply():
    found = elementwise(np, np.zeros((3, 0)), np.zeros((0, 2)), {"d": np.zeros((3, 2)), "e": np.full((3, 2), 1e-300)})
    assert found["d"].modulus == 0
    assert found["e"].modulus == math.inf
    assert elementwise(np, np.zeros((0, 3)), np.zeros((3, 2)), {"d": np.zeros((0, 2))})["d"].modulus == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_where_nothing_is_and_infinite_where_something_is(dtype):
    a, b = operands(np, "zero-rows", 9, 9, 9, dtype, 1)
    d = a @ b
    assert elementwise(np, a, b, {"d": d})["d"].modulus < 10
    d[0, 1] = np.finfo(dtype).tiny
    found = elementwise(np, a, b, {"d": d})["d"]
    assert (found.modulus, found.at, found.odd) == (math.inf, (0, 1), 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "exp-6n"])
def test_classes_of_what_is_not_finite(dtype, kind):
    a, b = operands(np, kind, 12, 11, 10, dtype, 1)
    a[1, 2], a[4, 5], a[7, 0] = np.nan, np.inf, -np.inf
    b[5, 3] = -np.inf
    with np.errstate(all="ignore"):
        d = a @ b
    found = hold_product(np, a, b, d, "plain")["ours"]
    assert found.odd >= 3 * 11
    assert found.modulus < 100
    places = [((1, 1), 0), ((4, 0), 1), ((0, 0), np.inf), ((0, 1), np.nan)]
    if np.dtype(dtype).kind == "f":
        places.append(((4, 0), np.nan))
    for place, value in places:
        wrong = d.copy()
        wrong[place] = value
        got = elementwise(np, a, b, {"d": wrong})["d"]
        assert (got.modulus, got.at) == (math.inf, place)
    if np.dtype(dtype).kind == "f":
        wrong = np.where(np.isinf(d), -d, d)
        assert elementwise(np, a, b, {"d": wrong})["d"].modulus == math.inf


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_overflow_is_infinite_and_underflow_is_allowed(dtype):
    most, least = np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal
    a, b = np.array([[most, 1]], dtype), np.array([[2], [1]], dtype)
    assert elementwise(np, a, b, {"d": np.array([[np.inf]], dtype)})["d"].modulus == 0
    assert elementwise(np, a, b, {"d": np.array([[most]], dtype)})["d"].modulus == math.inf
    a, b = np.array([[3 * least]], dtype), np.array([[0.5]], dtype)  # halves of the smallest number
    for d in (least, 2 * least):
        assert elementwise(np, a, b, {"d": np.array([[d]], dtype)})["d"].modulus == 0
    assert elementwise(np, a, b, {"d": np.zeros((1, 1), dtype)})["d"].modulus > 1e5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["tiny", "subnormal", "huge"])
def test_flushed_subnormal_numbers_show(dtype, kind):
    a, b = operands(np, kind, 40, 30, 20, dtype, 1)
    d = a @ b
    assert elementwise(np, a, b, {"d": d})["d"].modulus < 20
    tiny = np.finfo(dtype).tiny
    of_d, of_a = (np.where(np.abs(x) < tiny, 0, x).astype(dtype) for x in (d, a))
    flushed = of_d if kind == "tiny" else of_a @ b
    if kind != "huge":
        assert elementwise(np, a, b, {"d": flushed})["d"].modulus > 1e4


def test_limits():
    assert limit(0) == 4
    assert limit(3) == 6
    assert math.isnan(limit(math.nan)) or limit(math.nan) == 4
    assert unit("complex64") == 2.0**-24
    assert unit("float64") == 2.0**-53


@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(["sum", "mean", "sumsq", "max", "min", "absmax", "absmin"]),
    axis=st.sampled_from([0, 1]),
    complex_data=st.booleans(),
)
def test_allowances_of_reductions_hold_for_whatever_elements_may_be(seed, name, axis, complex_data):
    """Elements moved by as much as they may be: reductions of them, in double, stay within the allowance."""
    rng = np.random.default_rng(seed)
    r = np.exp(3 * rng.standard_normal((9, 7))) * rng.choice([-1.0, 1.0], (9, 7))
    e = np.abs(r) * rng.choice([0, 1e-3, 1, 10], (9, 7))
    shift = rng.choice([-1.0, 0.3, 1.0], (9, 7)).astype(complex if complex_data else float)
    if complex_data:
        r = r * np.exp(2j * np.pi * rng.random((9, 7)))
        shift *= np.exp(2j * np.pi * rng.random((9, 7)))
        name = {"max": "absmax", "min": "absmin"}.get(name, name)
    expected, allowed = reduction_allowance(np, name, r, e, axis, 2.0**-53)
    d = r + e * shift
    found = {
        "sum": d.sum(axis=axis),
        "mean": d.mean(axis=axis),
        "sumsq": (np.abs(d) ** 2).sum(axis=axis),
    }.get(name)
    if found is None:
        values = np.abs(d) if name.startswith("abs") else d
        found = getattr(np, name.removeprefix("abs"))(values, axis=axis)
    assert (np.abs(found - expected) <= allowed * (1 + 1e-12)).all()


def test_arguments():
    values = np.array([[1.0, 5.0], [1.1, 4.0], [0.0, -3.0]])
    e = np.full(values.shape, 0.06)
    assert argument_holds(np, values, e, np.array([1, 0]), largest=True).all()
    assert argument_holds(np, values, e, np.array([0, 0]), largest=True).all()
    assert not argument_holds(np, values, e, np.array([2, 1]), largest=True).any()
    assert argument_holds(np, values, e, np.array([2, 2]), largest=False).all()
    assert not argument_holds(np, values, e, np.array([0, 1]), largest=False).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_product_and_scale(dtype):
    a, b = operands(np, "exp-3n", 7, 6, 30, dtype, 2)
    product, scale = product_and_scale(np, a, b)
    wide = np.result_type(dtype, np.float64)
    np.testing.assert_allclose(product, a.astype(wide) @ b.astype(wide), rtol=1e-12)
    np.testing.assert_allclose(scale, np.abs(a.astype(wide)) @ np.abs(b.astype(wide)), rtol=1e-12)
