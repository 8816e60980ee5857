"""Kinds of data by name: what each is, and that it is the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest
from accuracy_cases import DTYPES

from gemmserve_kernels.bench.elementwise import product_and_scale
from gemmserve_kernels.bench.kinds import BY_WEIGHT, EXACT, KINDS, draw, most, operands

M, N, K = 60, 52, 72


def made(kind, dtype="complex64", m=M, n=N, k=K, seed=1):
    return operands(np, kind, m, n, k, dtype, seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_shape_dtype_and_finite_elements(kind, dtype):
    a, b = made(kind, dtype)
    assert (a.shape, b.shape, a.dtype, b.dtype) == ((M, K), (K, N), dtype, dtype)
    assert np.isfinite(a).all()
    assert np.isfinite(b).all()
    assert a.any()
    assert b.any()
    again = made(kind, dtype)
    np.testing.assert_array_equal(a, again[0])
    np.testing.assert_array_equal(b, again[1])


@pytest.mark.parametrize("kind", KINDS)
def test_extents_of_one_and_odd_ones(kind):
    for shape in ((1, 1, 1), (3, 5, 1), (2, 1, 7), (130, 3, 65)):
        a, b = operands(np, kind, *shape, "complex128", 2)
        assert (a.shape, b.shape) == ((shape[0], shape[2]), (shape[2], shape[1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", EXACT)
def test_exact_kinds_have_one_nonzero_term(kind, dtype):
    a, b = made(kind, dtype, m=K, n=K)
    ones = b if kind.endswith("right") else a
    assert set(np.unique(ones)) == {0, 1}
    lines = ones.sum(axis=0 if kind.endswith("right") else 1)
    assert (lines == 1).all()
    assert ((ones != 0).sum(axis=0) == 1).all()
    reference, _ = product_and_scale(np, a, b)
    np.testing.assert_array_equal(reference.astype(dtype), a @ b)


def test_one_side_is_normal():
    for kind in ("identity", "permutation", "gate", "diagonal", "row-scaled"):
        assert abs(np.std(made(kind, "float64")[1]) - 1) < 0.1
    for kind in ("identity-right", "permutation-right", "column-scaled"):
        assert abs(np.std(made(kind, "float64")[0]) - 1) < 0.1


def test_a_gate():
    a = made("gate", "float32", m=4, k=4)[0]
    np.testing.assert_array_equal(a, np.kron(np.eye(2), [[1, 1], [1, -1]]))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_heavy_tails_and_spikes(dtype):
    rng = np.random.default_rng(5)
    x = draw(np, rng, "exp-6n", (400, 300), "a", dtype)
    assert (x > 0).all()
    assert np.std(np.log(x)) == pytest.approx(6, rel=0.02)
    x = draw(np, rng, "spikes", (1000, 1000), "a", dtype)
    assert 60 < (x == 1000).sum() < 150
    assert np.median(np.abs(x)) == pytest.approx(0.67e-6, rel=0.05)
    x = draw(np, rng, "60-binades", (400, 300), "a", dtype)
    assert 55 < np.ptp(np.frexp(x)[1]) < 90
    x = draw(np, rng, "sparse-1", (400, 300), "a", dtype)
    assert np.count_nonzero(x) == pytest.approx(1200, rel=0.2)
    x = draw(np, rng, "few", (400, 300), "a", dtype)
    assert (np.count_nonzero(x, axis=1) <= 3).all()
    x = draw(np, rng, "few", (300, 400), "b", dtype)
    assert (np.count_nonzero(x, axis=0) <= 3).all()


def test_grading_cancels_along_k():
    a, b = made("graded", "float64", k=200)
    size_a, size_b = np.abs(a).mean(axis=0), np.abs(b).mean(axis=1)
    assert np.log2(size_a[-20:].mean() / size_a[:20].mean()) > 30
    assert np.log2(size_b[:20].mean() / size_b[-20:].mean()) > 30


@pytest.mark.parametrize("dtype", ["float32", "complex64", "float64", "complex128"])
def test_the_ends_of_the_range(dtype):
    real = np.finfo(dtype)
    with np.errstate(over="raise", invalid="raise"):
        for k in (1, 16, 1000):
            a, b = made("huge", dtype, k=k)
            product, scale = product_and_scale(np, a, b)
            assert scale.max() * (2 if np.dtype(dtype).kind == "c" else 1) < real.max
            assert scale.max() > real.max / 2**16
    product, _ = product_and_scale(np, *made("tiny", dtype))
    sizes = np.abs(product)
    assert 0 < np.median(sizes) < real.tiny
    a, _ = made("subnormal", dtype)
    assert 0 < np.abs(a).max() < real.tiny


def test_pairs_nearly_cancel():
    a, b = made("pairs", "float64", k=71)
    np.testing.assert_array_equal(b[0:70:2], b[1:71:2])
    assert (np.abs(a[:, 0:70:2] + a[:, 1:71:2]) <= 2.0**-12 * np.abs(a[:, 0:70:2])).all()


@pytest.mark.parametrize("k", [64, 200])
def test_a_dominant_term(k):
    a, b = made("dominant-term", "float64", k=k)
    assert not a[:, :-64].any()
    assert not b[:-64].any()
    assert (a[:, -64:] > 0).all()
    product, last = a @ b, a[:, -1:] * b[-1:]
    assert (last / (product - last)).min() > 2**3
    assert np.median(last / (product - last)) == pytest.approx(2**5, rel=0.1)


def test_bounds_of_kinds_that_break_the_rule():
    assert most("normal", "float32", 1.0) == 4
    assert most("normal", "float32", 3.0) == 6
    assert most("dominant-term", "complex64", 3.0) == KINDS["dominant-term"].bound > 4
    assert most("dominant-term", "complex64", 30.0) == 60
    assert most("dominant-term", "complex128", 1.0) == 4
    assert [name for name, kind in KINDS.items() if kind.bound] == ["dominant-term"]


def test_parts_of_complex_data():
    a, b = made("cancelling-imag")
    product, scale = product_and_scale(np, a, b)
    assert (product.real > 0.9 * scale).all()
    assert (np.abs(product.imag) < 2.0**-8 * scale).all()
    assert not made("real-in-complex")[0].imag.any()
    a, _ = made("steering", "complex128")
    np.testing.assert_allclose(np.abs(a), 1, rtol=1e-12)
    np.testing.assert_allclose(a[:, 1] ** 2, a[:, 2], rtol=1e-12)
    a, _ = made("qam16", "complex128", m=500)
    assert len(np.unique(a.round(9))) == 16
    assert np.mean(np.abs(a) ** 2) == pytest.approx(1, rel=0.05)


def test_the_order_of_measurement():
    assert set(BY_WEIGHT) == set(KINDS)
    assert set(BY_WEIGHT[:3]) <= {"exp-6n", "spikes", "identity"}
    with pytest.raises(KeyError):
        draw(np, np.random.default_rng(0), "no such kind", (2, 2), "a", "float32")
