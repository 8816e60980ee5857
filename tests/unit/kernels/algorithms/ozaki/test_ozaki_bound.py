"""The theorem of ozaki.bound in exact arithmetic, attacked by a search; and what passes it."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from fresh_rng import fresh_rng
from kernel_models import ozaki as ozaki_model

from gemmserve_kernels.algorithms.ozaki import bound
from gemmserve_kernels.algorithms.ozaki.moduli import Moduli, available, needed

U = Fraction(1, 2**53)


def scaled(x, moduli):
    """The real parts of lines in units of their scales: rounded once, as kernels have them."""
    codes = ozaki_model.codes(x, moduli)
    return [np.ldexp(p, (codes >> 3)[:, None]) * ((codes & 7) / 4)[:, None] for p in ozaki_model.parts(x)]


def deficits(x, moduli):
    size = bound.whole(moduli, x.shape[1], complex_=x.dtype.kind == "c")
    return ozaki_model.deficits(scaled(x, moduli), size)


def share(x, y, moduli):
    """|D - R| / (|x| |y|) of the real and the imaginary part of x y^T before the last rounding, the larger, exactly, in
    units of 2^-53; for two lines.
    """
    exact = [[[Fraction(float(v)) for v in part[0]] for part in ozaki_model.parts(z)] for z in (x, y)]
    whole = []
    for z in (x, y):
        (code,) = codes = ozaki_model.codes(z, moduli)
        scale = Fraction(2) ** int(code >> 3) * int(code & 7) / 4
        whole.append([[int(v) / scale for v in part[0]] for part in ozaki_model.integers(z, codes)])

    def dot(p, q):
        return sum((u * v for u, v in zip(p, q, strict=True)), Fraction(0))

    def size(p, q):
        return dot([abs(u) for u in p], [abs(v) for v in q])

    def worst(pairs):
        off = sum(sign * (dot(whole[0][p], whole[1][q]) - dot(exact[0][p], exact[1][q])) for p, q, sign in pairs)
        return float(abs(off) / sum(size(exact[0][p], exact[1][q]) for p, q, _ in pairs) / U)

    if x.dtype.kind != "c":
        return worst([(0, 0, 1)])
    return max(worst([(0, 0, 1), (1, 1, -1)]), worst([(0, 1, 1), (1, 0, 1)]))


def share_apart(x, y, moduli, apart):
    """`share` of lines of which `apart` elements, (of x, of y), are multiplied exactly."""
    rest = [np.where(mask, 0, z) for z, mask in zip((x, y), apart, strict=True)]
    gone = [np.where(mask, z, 0) for z, mask in zip((x, y), apart, strict=True)]

    def fractions(z):
        return [[Fraction(float(v)) for v in part[0]] for part in ozaki_model.parts(z)]

    def rounded(z):
        (code,) = codes = ozaki_model.codes(z, moduli)
        if code == ozaki_model.ZERO_LINE:
            return fractions(z)
        scale = Fraction(2) ** int(code >> 3) * int(code & 7) / 4
        return [[int(v) / scale for v in part[0]] for part in ozaki_model.integers(z, codes)]

    def dot(p, q):
        return sum((u * v for u, v in zip(p, q, strict=True)), Fraction(0))

    exact, residues = [fractions(z) for z in (x, y)], [rounded(z) for z in rest]
    sparse, thin = fractions(gone[0]), fractions(gone[1])
    left = fractions(rest[0])

    def worst(pairs):
        made = sum(
            sign * (dot(residues[0][p], residues[1][q]) + dot(sparse[p], exact[1][q]) + dot(left[p], thin[q]))
            for p, q, sign in pairs
        )
        wanted = sum(sign * dot(exact[0][p], exact[1][q]) for p, q, sign in pairs)
        size = sum(dot([abs(u) for u in exact[0][p]], [abs(v) for v in exact[1][q]]) for p, q, _ in pairs)
        return float(abs(made - wanted) / size / U)

    if x.dtype.kind != "c":
        return worst([(0, 0, 1)])
    return max(worst([(0, 0, 1), (1, 1, -1)]), worst([(0, 1, 1), (1, 0, 1)]))


def passes(x, y, moduli):
    return ozaki_model.passes(deficits(x, moduli), deficits(y, moduli), x.shape[1])


def aligned(x, y, moduli):
    """`x` nudged by less than half a unit, so that what rounding loses of it adds up over `y`."""
    code = ozaki_model.codes(x, moduli)
    unit = 2.0 ** -(code >> 3)[0] / ((code & 7)[0] / 4)
    whole = np.rint(x / unit)
    nudged = (whole - 0.49 * np.sign(y)) * unit
    return nudged if np.array_equal(ozaki_model.codes(nudged, moduli), code) else x


@pytest.mark.parametrize("count", [12, 13, 14])
def test_a_search_does_not_break_the_bound(count):
    rng = fresh_rng()
    k, moduli = 128, Moduli.first(count)
    limit = ozaki_model.lost(moduli, k, complex_=False)
    best = 0.0
    for _ in range(3):
        # Large where the other is small: the least that (1) allows.
        order = rng.permutation(k)
        x = np.where(order < k * rng.uniform(0.3, 0.6), 1.0, rng.uniform(0.01, 0.5)) * rng.uniform(0.9, 1.1, k)
        y = np.where(order > k * rng.uniform(0.4, 0.7), 1.0, rng.uniform(0.01, 0.5)) * rng.uniform(0.9, 1.1, k)
        x, y, here = x[None], y[None], 0.0
        for _ in range(60):
            u, v = x.copy(), y.copy()
            for z in (u, v):
                z[0, rng.integers(k, size=rng.integers(1, 6))] *= 2.0 ** rng.uniform(-12, 12)
            u = aligned(u, v, moduli)
            v = aligned(v, u, moduli)
            if passes(u, v, moduli) and (found := share(u, v, moduli)) >= here:
                x, y, here = u, v, found
        best = max(best, here)
    assert best <= limit
    # The search came near: the bound says something.
    assert best >= limit / 20


@pytest.mark.parametrize("count", [15, 16, 17])
def test_complex_lines_keep_to_it(count):
    rng = fresh_rng()
    k, moduli = 128, Moduli.first(count, complex_=True)
    for _ in range(20):
        x, y = (rng.standard_normal((2, 1, k)) * 2.0 ** rng.uniform(-1, 1, (2, 1, k)) for _ in range(2))
        # Parts of one side may be as small as they like, if the other's are not.
        x, y = x[0] + 1j * x[1] * 2.0 ** rng.integers(-30, 1), y[0] + 1j * y[1]
        if passes(x, y, moduli):
            assert share(x, y, moduli) <= ozaki_model.lost(moduli, k, complex_=True)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_lines_with_outliers_keep_to_it(dtype):
    """Whatever is taken out of lines, if what is left of them passes: chosen by the kernels' rule, and by chance."""
    rng = fresh_rng()
    k, complex_ = 128, dtype == "complex128"
    moduli = Moduli.first(15, complex_=complex_)
    limit = ozaki_model.lost(moduli, k, complex_=complex_)
    served = 0
    for turn in range(24):
        pair, masks = [], []
        for _ in range(2):
            (x,) = lines("normal", rng, 1, k, dtype)[None] * 2.0 ** rng.uniform(-1, 1, (1, 1, k))
            spots = rng.choice(k, int(rng.integers(0, 9)), replace=False)
            x[0, spots] *= 2.0 ** rng.integers(10, 200, len(spots))
            mask = ozaki_model.outliers(x, moduli, 16)
            if turn % 2:
                mask = np.isin(np.arange(k), [*spots, *rng.integers(k, size=3)])[None]
            pair.append(x)
            masks.append(mask)
        rest = [np.where(mask, 0, x) for x, mask in zip(pair, masks, strict=True)]
        if passes(*rest, moduli):
            served += 1
            assert share_apart(*pair, moduli, masks) <= limit
    assert served >= 12


def test_a_search_does_not_break_the_bound_with_outliers():
    """As above, one outlier a line, which meets what is ordinary."""
    rng = fresh_rng()
    k, moduli = 128, Moduli.first(14)
    limit, best = ozaki_model.lost(moduli, k, complex_=False), 0.0
    for _ in range(3):
        order = rng.permutation(k)
        x = np.where(order < k * rng.uniform(0.3, 0.6), 1.0, rng.uniform(0.01, 0.5)) * rng.uniform(0.9, 1.1, k)
        y = np.where(order > k * rng.uniform(0.4, 0.7), 1.0, rng.uniform(0.01, 0.5)) * rng.uniform(0.9, 1.1, k)
        masks = [np.arange(k)[None] == spot for spot in rng.integers(k, size=2)]
        x, y, here = x[None], y[None], 0.0
        for _ in range(60):
            u, v = x.copy(), y.copy()
            for z in (u, v):
                z[0, rng.integers(k, size=rng.integers(1, 6))] *= 2.0 ** rng.uniform(-12, 12)
            rest = [np.where(mask, 0, z) for z, mask in zip((u, v), masks, strict=True)]
            u = np.where(masks[0], u, aligned(rest[0], rest[1], moduli))
            v = np.where(masks[1], v, aligned(rest[1], np.where(masks[0], 0, u), moduli))
            rest = [np.where(mask, 0, z) for z, mask in zip((u, v), masks, strict=True)]
            if passes(*rest, moduli) and (found := share_apart(u, v, moduli, masks)) >= here:
                x, y, here = u, v, found
        best = max(best, here)
    assert limit / 20 <= best <= limit


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_what_passes_without_its_outliers(dtype):
    """And only so; beside normal data, with as many outliers as pay at that k."""
    rng = fresh_rng()
    k = 8192
    moduli, most = (
        Moduli.first(needed(k, np.dtype(dtype)), complex_=dtype == "complex128"),
        bound.most_outliers(k, dtype),
    )
    normal = deficits(lines("normal", rng, 64, k, dtype), moduli)
    for kind in ("spikes", "targets", "identity", "gate"):
        x = lines(kind, rng, 64, k, dtype)
        apart = ozaki_model.outliers(x, moduli, most)
        assert not ozaki_model.passes(deficits(x, moduli), normal, k), kind
        assert ozaki_model.passes(deficits(np.where(apart, 0, x), moduli), normal, k), kind
        assert 0 < apart.sum(axis=1).max() <= most
    for kind in ("normal", "uniform", "one-sided", "QAM", "scaled", "steering", "exponents", "sparse"):
        apart = ozaki_model.outliers(lines(kind, rng, 64, k, dtype), moduli, most)
        assert not apart.any(), kind


def test_how_many_outliers_pay():
    found = [bound.most_outliers(k, np.dtype("complex128")) for k in (1, 1024, 1152, 2048, 8192, 1 << 24)]
    assert found == [0, 0, 1, 8, 56, bound.MOST_OUTLIERS]
    assert bound.most_outliers(8192, np.dtype("float64")) == 12
    assert bound.most_outliers(8192, np.dtype("complex64")) == 56
    assert bound.most_outliers(8192, np.dtype("float32")) == 12


def test_counting_bounds_the_sum_of_magnitudes():
    """(1), where large elements of one meet small ones of the other, by the rearrangement inequality the worst case."""
    rng = fresh_rng()
    for _ in range(300):
        k, moduli = int(rng.integers(16, 200)), Moduli.first(15)
        x = np.sort(np.abs(rng.standard_normal((1, k))) ** rng.uniform(0.1, 3))
        y = np.sort(np.abs(rng.standard_normal((1, k))) ** rng.uniform(0.1, 3))[:, ::-1]
        size = bound.whole(moduli, k, complex_=False)
        (u,), (v,) = scaled(x, moduli), scaled(y, moduli)
        least = size**2 * (k - ozaki_model.deficits([u], size)[0, 0] - ozaki_model.deficits([v], size)[0, 0])
        assert (np.abs(u) * np.abs(v)).sum() >= least * (1 - 1e-12)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_norms_bound_what_is_counted(dtype):
    """`least_deficits` beside `deficits`, and nearly all of k where one element has all of the norm."""
    rng = fresh_rng()
    for _ in range(100):
        k = int(rng.integers(16, 300))
        x = rng.standard_normal((8, k)) * np.exp(rng.uniform(0, 6) * rng.standard_normal((8, k)))
        if dtype == "complex128":
            x = x + 1j * rng.standard_normal((8, k)) * 2.0 ** rng.integers(-30, 30)
        x[0], x[1, 1:] = 0, 0
        moduli = Moduli.first(needed(k, np.dtype(dtype)), complex_=dtype == "complex128")
        size = bound.whole(moduli, k, complex_=dtype == "complex128")
        parts = scaled(x, moduli)
        least, found = ozaki_model.least_deficits(parts, size), ozaki_model.deficits(parts, size)[:, 2]
        assert (least <= found).all()
        assert least[1] >= k - 2 * math.sqrt(k) / bound.GAMMA - k / 4 / bound.WHOLE - 1


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_independent_roundings_lose_what_is_said(dtype):
    rng = np.random.default_rng(5)
    k = 512
    moduli = Moduli.first(needed(k, np.dtype(dtype)), complex_=dtype == "complex128")
    lines = []
    for _ in range(2):
        x = rng.standard_normal((60, k))
        lines.append(x + 1j * rng.standard_normal((60, k)) if dtype == "complex128" else x)
    x, y = lines
    shares = [share(x[i : i + 1], y[i : i + 1], moduli) for i in range(60)]
    deviation = ozaki_model.deviation(moduli, k, complex_=dtype == "complex128")
    assert math.sqrt(np.mean(np.square(shares))) <= deviation
    assert max(shares) <= min(4, 6 * deviation)


def lines(kind, rng, n, k, dtype):
    def one(draw):
        x = draw((n, k))
        return x + 1j * draw((n, k)) if dtype == "complex128" else x

    draws = {
        "normal": rng.standard_normal,
        "uniform": lambda shape: rng.uniform(-1, 1, shape),
        "one-sided": rng.random,
        "QAM": lambda shape: rng.choice([-3.0, -1.0, 1.0, 3.0], shape),
        "heavy": rng.standard_cauchy,
        "exponents": lambda shape: np.exp(6 * rng.standard_normal(shape)),
        "spikes": lambda shape: 1e-6 * rng.standard_normal(shape) + 1e3 * (rng.random(shape) < 3 / k),
        "sparse": lambda shape: rng.standard_normal(shape) * (rng.random(shape) < 0.05),
    }
    if kind in draws:
        return one(draws[kind])
    if kind == "targets":
        x = one(rng.standard_normal)
        spots = rng.integers(k, size=(n, 3))
        x[np.arange(n)[:, None], spots] *= 10.0 ** rng.uniform(3, 5, (n, 3))
        return x
    if kind == "scaled":
        return one(rng.standard_normal) * 2.0 ** rng.integers(-300, 300, (n, 1))
    if kind == "steering":
        x = np.exp(2j * np.pi * rng.random((n, k)))
        return x if dtype == "complex128" else x.real
    if kind == "identity":
        return np.eye(n, k, dtype=dtype)
    if kind == "gate":
        return np.kron(np.eye(n // 2, k // 2), np.array([[1, 1], [1, -1]])).astype(dtype)
    raise ValueError(kind)


@pytest.mark.parametrize("k", [128, 300, 1024, 1200, 1400, 2047, 8193])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_what_passes(k, dtype):
    """Wherever norms lie between two scales: with the moduli that `auto` takes, and with all."""
    rng, complex_ = fresh_rng(), dtype == "complex128"
    for count in (needed(k, np.dtype(dtype)), len(available(complex_=complex_))):
        moduli = Moduli.first(count, complex_=complex_)
        for kind in ("normal", "uniform", "one-sided", "QAM", "scaled", "steering"):
            worst = deficits(lines(kind, rng, 128, k, dtype), moduli)[:, 0].max()
            # Without a doubt, or nearly so where k is small.
            assert (2 if k > 200 else 1.8) * bound.WHOLE * worst <= bound.limit(k), kind


@pytest.mark.parametrize("k", [128, 1024])
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_what_does_not(k, dtype):
    rng = fresh_rng()
    moduli = Moduli.first(needed(k, np.dtype(dtype)), complex_=dtype == "complex128")
    normal = deficits(lines("normal", rng, 64, k, dtype), moduli)
    for kind in ("heavy", "exponents", "spikes", "sparse", "identity", "gate"):
        assert not ozaki_model.passes(deficits(lines(kind, rng, 64, k, dtype), moduli), normal, k), kind


def test_lines_of_zeros_lose_nothing():
    moduli = Moduli.first(15, complex_=True)
    x = np.ones((2, 200), complex)
    x[0] = 0
    found = deficits(x, moduli)
    np.testing.assert_array_equal(found[0], [0, 0, 0])
    # One part: none to cover for the other.
    np.testing.assert_array_equal(found[1], [0, ozaki_model.NEVER / bound.WHOLE, 0])


def test_nearly_real_lines_pass_with_others():
    rng = fresh_rng()
    k, moduli = 1024, Moduli.first(15, complex_=True)
    normal = deficits(lines("normal", rng, 64, k, "complex128"), moduli)
    nearly = lines("normal", rng, 64, k, "complex128")
    nearly.imag *= 1e-9
    thin = deficits(nearly, moduli)
    assert ozaki_model.passes(thin, normal, k)
    assert ozaki_model.passes(normal, thin, k)
    assert not ozaki_model.passes(thin, thin, k)


def test_deficits_fit_their_words():
    assert 2 * ozaki_model.NEVER < 2**32
    assert bound.limit(1 << 24) < ozaki_model.NEVER
    assert bound.WHOLE << 24 <= ozaki_model.NEVER
