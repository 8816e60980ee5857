"""Moduli and the NumPy model of the residue scheme: exact integers, and the error against long double."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from kernel_models import ozaki as ozaki_model

from gemmserve_kernels.algorithms.ozaki.gemm import resolve, supports
from gemmserve_kernels.algorithms.ozaki.moduli import DIGIT, LIMB, MODULI, Moduli, limbs, needed
from gemmserve_kernels.algorithms.ozaki.plan import WORKSPACE, panels
from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.numerics import reference
from gemmserve_kernels.problem.config import GemmConfig
from gemmserve_kernels.problem.errors import ConfigInfeasible
from gemmserve_kernels.problem.problem import GemmProblem, Operand

COUNTS = range(2, len(MODULI) + 1)


def test_the_moduli_are_pairwise_coprime_and_fit_a_byte():
    assert all(math.gcd(p, q) == 1 for p, q in itertools.combinations(MODULI, 2))
    assert max(MODULI) == 256
    assert min(MODULI) > 128
    # None between 197 and 256 was left out.
    for candidate in set(range(min(MODULI), 257)) - set(MODULI):
        assert any(math.gcd(candidate, p) > 1 for p in MODULI if p > candidate)


@pytest.mark.parametrize("count", COUNTS)
def test_remainder_constants(count):
    moduli = Moduli.first(count)
    assert moduli.product == math.prod(MODULI[:count])
    for i, weight in enumerate(moduli.weights):
        assert 0 <= weight < moduli.product
        assert [weight % p for p in moduli.moduli] == [int(i == j) for j in range(count)]
    for p, digits in zip(moduli.moduli, moduli.digits, strict=True):
        for i, digit in enumerate(digits, 1):
            assert (digit - 2 ** (DIGIT * i)) % p == 0
            assert abs(digit) <= p // 2


@pytest.mark.parametrize("count", COUNTS)
def test_limbs_keep_every_sum_exact(count):
    moduli = Moduli.first(count)
    for x in (*moduli.weights, moduli.product):
        low, middle, high = limbs(x)
        assert int(low) + (int(middle) << LIMB) + (int(high) << 2 * LIMB) == x
        # z - x - y of Karatsuba has two bits more than a residue.
        assert max(low, middle, high) * 512 * count < 2**53
    # The multiple of P that is taken away, times its limbs; and the difference of the middle sums.
    multiple = 512 * count
    assert all(2 * limb * multiple < 2**53 for limb in limbs(moduli.product)[:2])


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("k", [1, 1000, 1 << 20])
def test_integers_stay_below_half_the_product(count, k):
    moduli = Moduli.first(count)
    target = moduli.target(k)
    if target <= 0:
        return
    largest = Fraction(target) + Fraction(math.nextafter(math.sqrt(k / 2), math.inf))  # after rounding to integers
    # Away from one half by more than the roundings in the choice of the multiple of P.
    assert 2 * largest**2 < moduli.product * (1 - Fraction(2) ** -27)
    # The digits of an element, and the sums of digits times powers of 2**15 modulo p, exact in float32.
    assert largest < 2 ** (3 * DIGIT) * 2**14
    assert 2**14 + 3 * 2**14 * 128 < 2**23


def test_a_residue_by_reciprocal_is_right():
    """`reduce` in cuda/ozaki/layout.cuh, at multiples of p and around them, where a quotient could be off."""
    for p in MODULI:
        bias, reciprocal = -(-(1 << 30) // p) * p, (1 << 39) // p
        assert reciprocal < 2**32
        top = bias + 2**30
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
    assert [found[k, "c16"] for k in (64, 512, 4096, 8192, 16384, 100000)] == [14, 14, 14, 14, 15, 15]
    assert [found[k, "f8"] for k in (64, 512, 8192, 16384)] == [15, 15, 15, 15]
    assert all(found[k, d] in {7, 8} for k in (512, 4096, 8192, 16384) for d in ("c8", "f4"))


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
    d = ozaki_model.gemm(a, b, Moduli.first(14))
    error = reference.errors(d, exact)
    # Columns of very different sizes: a row's norm is that of a few elements, so that the error scatters.
    assert error.rel_fro <= (3e-15 if kind == "rows" else 1.5e-15)
    # Enough moduli leave nothing but the rounding of the inputs to 53 bits and of the result.
    fine = reference.errors(ozaki_model.gemm(a, b, Moduli.first(15)), exact)
    assert fine.rel_fro <= 3e-16


def test_the_expected_error_is_what_is_seen():
    rng = np.random.default_rng(4)
    for count, k, complex_ in [(7, 2000, True), (14, 2000, True), (9, 300, False)]:
        a, b = _kinds("normal", rng, 24, 20, k, complex_)
        problem = GemmProblem.build(Operand.of(a), Operand.of(b), compute="fp64")
        seen = reference.errors(ozaki_model.gemm(a, b, Moduli.first(count)), reference.oracle_gemm(problem, a, b))
        expected = Moduli.first(count).error(k, complex_=complex_)
        assert 0.7 * expected < seen.rel_fro < 1.3 * expected


def test_small_integers_multiply_without_error():
    rng = np.random.default_rng(5)
    a, b = (rng.integers(-9, 10, (20, 20)) + 1j * rng.integers(-9, 10, (20, 20)) for _ in range(2))
    np.testing.assert_array_equal(ozaki_model.gemm(a, b, Moduli.first(14)), a @ b)


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
        (GemmConfig(moduli=16), "moduli"),
        (GemmConfig(moduli=2), "too few"),
        (GemmConfig(stages=5), "shared memory"),
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
    found = list(panels(m, n, pitch, 3, 42, workspace))
    assert sum(p.matrices * p.rows * p.columns for p in found) == 3 * m * n
    assert len({(p.first, p.row, p.column) for p in found}) == len(found)
    assert all(p.row % 256 == p.column % 256 == 0 for p in found)
    assert all(p.row + p.rows <= m and p.column + p.columns <= n for p in found)
    largest = max(found, key=lambda p: p.rows + p.columns)
    rows, columns = (-(-x // 256) * 256 for x in (largest.rows, largest.columns))
    needed_bytes = largest.matrices * 42 * ((rows + columns) * pitch + rows * columns)
    assert needed_bytes <= workspace or (rows, columns, largest.matrices) == (256, 256, 1)


def test_the_large_product_takes_two_panels():
    found = list(panels(8192, 8192, 8192, 1, 42, WORKSPACE))
    assert [(p.rows, p.columns) for p in found] == [(8192, 4096)] * 2
