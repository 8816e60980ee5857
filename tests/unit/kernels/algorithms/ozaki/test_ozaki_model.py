"""Moduli and the NumPy model of the residue scheme: exact integers, and the error against long double."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from fresh_rng import fresh_rng
from kernel_models import ozaki as ozaki_model

from gemmserve_kernels.algorithms.ozaki.gemm import resolve, supports
from gemmserve_kernels.algorithms.ozaki.moduli import (
    DIGITS,
    LIMB,
    MODULI,
    SPLIT_MODULI,
    Moduli,
    available,
    limbs,
    needed,
    root_of_minus_one,
)
from gemmserve_kernels.algorithms.ozaki.params import MAGIC, base_of, half_of, inverse_of
from gemmserve_kernels.algorithms.ozaki.plan import WORKSPACE, panels
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ConfigInfeasible
from gemmserve_kernels.problem.problem import GemmProblem, Operand

COUNTS = [(n, complex_) for complex_ in (False, True) for n in range(2, len(available(complex_=complex_)) + 1)]


def test_the_moduli_are_pairwise_coprime_and_fit_a_byte():
    assert all(math.gcd(p, q) == 1 for p, q in itertools.combinations(MODULI, 2))
    assert max(MODULI) == 256
    assert min(MODULI) > 128
    # None between 197 and 256 was left out.
    for candidate in set(range(min(MODULI), 257)) - set(MODULI):
        assert any(math.gcd(candidate, p) > 1 for p in MODULI if p > candidate)


def _splits(p):
    """Whether p is odd and all of its prime factors are 1 modulo 4."""
    factors = [q for q in range(2, p + 1) if p % q == 0 and all(q % r for r in range(2, q))]
    return all(q % 4 == 1 for q in factors)


def test_the_moduli_of_complex_numbers_are_pairwise_coprime_and_minus_one_has_a_root():
    assert all(math.gcd(p, q) == 1 for p, q in itertools.combinations(SPLIT_MODULI, 2))
    assert list(SPLIT_MODULI) == sorted(SPLIT_MODULI, reverse=True)
    assert all(_splits(p) for p in SPLIT_MODULI)
    for p in SPLIT_MODULI:
        assert root_of_minus_one(p) ** 2 % p == p - 1
    for p in (3, 4, 251, 255, 256, 21):
        assert not _splits(p)
        with pytest.raises(ValueError, match="no root"):
            root_of_minus_one(p)


@pytest.mark.parametrize("count", [8, 15, 16, 17])
def test_no_other_moduli_of_complex_numbers_have_a_larger_product(count):
    """A search of all sets: those that have a factor in common with one that is larger may yet be the better choice."""
    candidates = [p for p in range(256, 2, -1) if p % 2 and _splits(p)]

    def best(chosen, rest, bits):
        nonlocal most
        missing = count - len(chosen)
        if missing == 0:
            most = max(most, bits)
            return
        fitting = [p for p in rest if all(math.gcd(p, q) == 1 for q in chosen)]
        if len(fitting) < missing or bits + sum(map(math.log2, fitting[:missing])) <= most:
            return
        best([*chosen, fitting[0]], fitting[1:], bits + math.log2(fitting[0]))
        best(chosen, fitting[1:], bits)

    own = sum(map(math.log2, SPLIT_MODULI[:count]))
    most = own - 1e-9
    best([], candidates, 0.0)
    assert most == pytest.approx(own)


@pytest.mark.parametrize(("count", "complex_"), COUNTS)
def test_remainder_constants(count, complex_):
    moduli = Moduli.first(count, complex_=complex_)
    assert moduli.moduli == available(complex_=complex_)[:count]
    assert moduli.product == math.prod(moduli.moduli)
    assert moduli.planes == count * (2 if complex_ else 1)
    for i, (p, root, weights) in enumerate(zip(moduli.moduli, moduli.roots, moduli.weights, strict=True)):
        assert 128 < moduli.divisors[i] <= 256
        assert moduli.divisors[i] % p == 0
        # What a weight is to be the inverse of: 2 of u + v, 2 r of u - v.
        factors = (2, 2 * root) if complex_ else (1,)
        for weight, factor in zip(weights, factors, strict=True):
            assert 2 * abs(weight) <= moduli.product
            assert [weight * factor % q for q in moduli.moduli] == [int(i == j) for j in range(count)]
        for powers, factor in zip(moduli.powers[i], (1, root), strict=complex_):
            for d, power in enumerate(powers):
                assert (power - factor * 2 ** (8 * d)) % p == 0
                assert -128 <= power <= 127


@pytest.mark.parametrize(("count", "complex_"), COUNTS)
def test_limbs_keep_every_sum_exact(count, complex_):
    """In ozaki_combine.cu: sums of residues times limbs, and what is left when a multiple of P is taken away."""
    moduli = Moduli.first(count, complex_=complex_)
    for part in range(moduli.parts):
        weights = [limbs(each[part]) for each in moduli.weights]
        for (low, middle, high), each in zip(weights, moduli.weights, strict=True):
            assert int(low) + (int(middle) << LIMB) + (int(high) << 2 * LIMB) == each[part]
        # |u + v - d|, |u - v| and residues themselves are at most d.
        sums = [sum(d * abs(each[i]) for d, each in zip(moduli.divisors, weights, strict=True)) for i in range(3)]
        whole = sum(d * abs(each[part]) for d, each in zip(moduli.divisors, moduli.weights, strict=True))
        multiple = whole // moduli.product + 1
        own = limbs(moduli.product)
        assert all(x < 2**53 for x in sums)
        assert all(x + multiple * abs(limb) < 2**53 for x, limb in zip(sums, own, strict=True))


@pytest.mark.parametrize("x", [0, 1, -1, 2**41, -(2**41), 2**41 - 1, 2**83 + 2**41, -(2**125), 2**125 - 1], ids=str)
def test_limbs_of(x):
    low, middle, high = limbs(x)
    assert -(2**41) <= low < 2**41
    assert -(2**41) <= middle < 2**41
    assert int(low) + (int(middle) << LIMB) + (int(high) << 2 * LIMB) == x


@pytest.mark.parametrize(("count", "complex_"), COUNTS)
@pytest.mark.parametrize("k", [1, 1000, 1 << 20])
def test_integers_stay_below_half_the_product(count, complex_, k):
    moduli = Moduli.first(count, complex_=complex_)
    target = moduli.target(k)
    if target <= 0:
        return
    largest = Fraction(target) + Fraction(math.nextafter(math.sqrt(k / 2), math.inf))  # after rounding to integers
    # Away from one half by more than the roundings in the choice of the multiple of P.
    assert 2 * largest**2 < moduli.product * (1 - Fraction(2) ** -27)
    assert largest < 2 ** (8 * (DIGITS - 1)) * 127


@pytest.mark.parametrize("complex_", [False, True])
def test_a_residue_by_float32_is_right(complex_):
    """`residue` in cuda/ozaki/ozaki_convert.cu, of all sums that there are."""
    moduli = Moduli.first(len(available(complex_=complex_)), complex_=complex_)
    for p, powers in zip(moduli.moduli, moduli.powers, strict=True):
        base, inverse = base_of(p, powers), inverse_of(p)
        sums = 128 * int(np.abs(powers).sum())
        half = half_of(p)
        assert (base + half) % p == base % 256 == 0
        assert (base + half) // p + MAGIC < 2**24
        assert 2**23 + sums <= base < 2**24 - sums
        # In float64, which has room for the product: fma rounds once.
        t = np.arange(-sums, sums + 1)
        quotient = np.rint((base + t) * np.float64(inverse)).astype(np.int64)
        assert np.abs(quotient).max() < 2**22
        remainder = base + t - (quotient - (base + half) // p) * p
        assert (remainder < 2**24).all()
        byte = remainder & 255
        assert np.array_equal(byte % p, t % p)
        assert p >= 255 or byte.max() < p


def test_a_residue_by_reciprocal_is_right():
    """`reduce` in cuda/ozaki/layout.cuh, at multiples of p and around them, where a quotient could be off."""
    for p in {*Moduli.first(15).divisors, *Moduli.first(17, complex_=True).divisors}:
        reciprocal = (1 << 39) // p
        assert reciprocal < 2**32
        top = 32768 * 255**2 + 256
        assert top < 2**31
        # The error grows with the number.
        multiples = np.concatenate([np.arange(0, top, 97 * p), np.arange(top // p * p - 100_000 * p, top, p)])
        multiples = multiples.astype(np.uint64)
        for shift in (-1, 0, 1):
            x = (multiples[1:] + np.uint64(shift % 2**64)) if shift >= 0 else multiples[1:] - np.uint64(1)
            remainder = x - (x * np.uint64(reciprocal) >> np.uint64(39)) * np.uint64(p)
            assert (remainder <= min(p, 255)).all()
            assert (remainder % np.uint64(p) == x % np.uint64(p)).all()


def test_the_number_of_moduli_follows_from_k_and_dtype():
    found = {(k, d): needed(k, d) for k in (1, 64, 512, 4096, 8192, 16384, 100000) for d in ("c16", "f8", "c8", "f4")}
    assert [found[k, "c16"] for k in (64, 512, 4096, 8192, 16384, 100000)] == [15, 15, 15, 15, 15, 16]
    assert [found[k, "f8"] for k in (64, 512, 8192, 16384)] == [15, 15, 15, 15]
    assert {found[k, d] for k in (1, 512, 4096, 8192, 16384, 100000) for d in ("c8", "f4")} == {8}


def test_which_integers_have_four_bytes():
    for complex_, most in ((True, 8), (False, 7)):
        assert [Moduli.first(n, complex_=complex_).short for n in range(2, 12)] == [n <= most for n in range(2, 12)]
        assert Moduli.first(most, complex_=complex_).target(1) < sum(127 << 8 * digit for digit in range(4))


def _kinds(kind, rng, m, n, k, complex_):
    def normal(*shape):
        x = rng.standard_normal(shape)
        return x + 1j * rng.standard_normal(shape) if complex_ else x

    a, b = normal(m, k), normal(k, n)
    if kind == "positive":
        a, b = np.abs(a.real) + (1j * np.abs(a.imag) if complex_ else 0), np.abs(b.real) + 0 * b
    if kind == "wide":
        a, b = a * 2.0 ** rng.uniform(-12, 12, a.shape), b * 2.0 ** rng.uniform(-12, 12, b.shape)
    if kind == "rows":
        a, b = a * 2.0 ** rng.integers(-300, 300, (m, 1)), b * 2.0 ** rng.integers(-300, 300, (1, n))
    if kind == "spike":
        a[:, 3] *= 2.0**30
    return a, b


@pytest.mark.parametrize("complex_", [True, False], ids=["complex", "real"])
@pytest.mark.parametrize("kind", ["normal", "positive", "wide", "rows", "spike"])
def test_the_model_is_as_accurate_as_promised(kind, complex_):
    m, n, k = 24, 20, 1500
    a, b = _kinds(kind, np.random.default_rng(3), m, n, k, complex_)
    problem = GemmProblem.build(Operand.of(a), Operand.of(b), compute="fp64")
    exact = reference.oracle_gemm(problem, a, b)
    usual, most = (15, 17) if complex_ else (14, 16)
    d = ozaki_model.gemm(a, b, Moduli.first(usual, complex_=complex_))
    error = reference.errors(d, exact)
    # Columns of very different sizes: a row's norm is that of a few elements, so that the error scatters.
    assert error.rel_fro <= (3e-15 if kind == "rows" else 1.5e-15)
    # Enough moduli leave nothing but the rounding of the result.
    fine = reference.errors(ozaki_model.gemm(a, b, Moduli.first(most, complex_=complex_)), exact)
    nearest = reference.errors(exact.astype(a.dtype), exact)
    assert fine.rel_fro <= (1e-16 if kind in {"rows", "spike"} else 1.1 * nearest.rel_fro)


@pytest.mark.parametrize(("count", "complex_"), [(17, True), (16, True), (16, False), (13, False)])
def test_integers_are_the_nearest(count, complex_):
    """Elements of 53 bits times scales of three: products have up to 56, and are rounded once."""
    (x, _), moduli = _kinds("wide", fresh_rng(), 24, 6, 90, complex_), Moduli.first(count, complex_=complex_)
    codes = ozaki_model.codes(x, moduli)
    assert len(set(codes & 7)) > 1
    scales = [Fraction(2) ** int(code >> 3) * int(code & 7) / 4 for code in codes]
    for part, whole in zip(ozaki_model.parts(x), ozaki_model.integers(x, codes), strict=True):
        for scale, exact, found in zip(scales, part, whole, strict=True):
            assert all(
                abs(Fraction(float(u)) * scale - int(v)) <= Fraction(1, 2) for u, v in zip(exact, found, strict=True)
            )


def test_the_expected_error_is_what_is_seen():
    rng = np.random.default_rng(4)
    for count, k, complex_ in [(8, 2000, True), (15, 2000, True), (9, 300, False)]:
        a, b = _kinds("normal", rng, 24, 20, k, complex_)
        problem = GemmProblem.build(Operand.of(a), Operand.of(b), compute="fp64")
        moduli = Moduli.first(count, complex_=complex_)
        seen = reference.errors(ozaki_model.gemm(a, b, moduli), reference.oracle_gemm(problem, a, b))
        expected = moduli.error(k)
        assert 0.7 * expected < seen.rel_fro < 1.3 * expected


def test_small_integers_multiply_without_error():
    rng = np.random.default_rng(5)
    a, b = (rng.integers(-9, 10, (20, 20)) + 1j * rng.integers(-9, 10, (20, 20)) for _ in range(2))
    np.testing.assert_array_equal(ozaki_model.gemm(a, b, Moduli.first(15, complex_=True)), a @ b)


def _problem(dtype="complex128", m=512, n=512, k=512, **options):
    return GemmProblem.build(
        Operand.contiguous((m, k), dtype), Operand.contiguous((k, n), dtype), compute="ozaki", **options
    )


def test_what_it_runs_on():
    assert supports(_problem(), KNOWN["H200"]) is None
    assert supports(_problem(k=2), KNOWN["H200"]) is None
    assert "k = 128" in supports(replace(_problem(k=100), compute="auto"), KNOWN["H200"])
    assert "9.0" in supports(_problem(), KNOWN["A100"])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GemmConfig(moduli=1), "moduli"),
        (GemmConfig(moduli=18), "moduli"),
        (GemmConfig(moduli=2), "too few"),
        (GemmConfig(stages=5), "shared memory"),
        (GemmConfig(cluster=3), "cluster"),
        (GemmConfig(block_m=64), "block_m"),
    ],
)
def test_what_cannot_be_set(config, words):
    with pytest.raises(ConfigInfeasible, match=words):
        resolve(config, _problem(k=100_000), KNOWN["H200"])


def test_overrides_are_honoured():
    tile = resolve(GemmConfig(moduli=9, stages=3, raster=4), _problem(), KNOWN["H200"])
    assert (tile.moduli, tile.stages, tile.raster) == (9, 3, 4)


@pytest.mark.parametrize(
    "extents", [(8192, 8192, 8192), (300, 520, 128), (20_000, 300, 4096), (1, 70_000, 65_536)], ids=str
)
@pytest.mark.parametrize("workspace", [1 << 20, 1 << 28, 6 << 30])
def test_panels_cover_every_element_once_and_keep_to_the_workspace(extents, workspace):
    m, n, pitch = extents
    found = list(panels(m, n, pitch, 3, 30, workspace))
    assert sum(p.matrices * p.rows * p.columns for p in found) == 3 * m * n
    assert len({(p.first, p.row, p.column) for p in found}) == len(found)
    assert all(p.row % 256 == p.column % 256 == 0 for p in found)
    assert all(p.row + p.rows <= m and p.column + p.columns <= n for p in found)
    largest = max(found, key=lambda p: p.rows + p.columns)
    rows, columns = (-(-x // 256) * 256 for x in (largest.rows, largest.columns))
    needed_bytes = largest.matrices * 30 * ((rows + columns) * pitch + rows * columns)
    assert needed_bytes <= workspace or (rows, columns, largest.matrices) == (256, 256, 1)


def test_how_many_panels_the_large_product_takes():
    assert len(list(panels(8192, 8192, 8192, 1, 34, WORKSPACE))) == 1
    found = list(panels(8192, 8192, 8192, 1, 42, WORKSPACE))
    assert [(p.rows, p.columns) for p in found] == [(8192, 4096)] * 2
