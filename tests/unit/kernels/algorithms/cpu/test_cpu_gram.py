"""Sums of squares on the CPU from Gram matrices: to the last place, and the product where they would not be."""

from __future__ import annotations

import numpy as np
import pytest
from host_products import products
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gemmserve_kernels import GemmConfig, GemmReduceProblem, Operand, gemm_reduce
from gemmserve_kernels.algorithms.cpu import gram
from gemmserve_kernels.algorithms.gram.plan import ACCURACY
from gemmserve_kernels.numerics.reference import oracle_gemm_reduce

ROUNDED = 2.0**-24 + ACCURACY


@pytest.fixture
def always(monkeypatch):
    """Whatever it costs, in small blocks."""
    monkeypatch.setattr(gram, "_LEAST", 0)
    monkeypatch.setattr(gram, "_GAIN", 0)
    monkeypatch.setattr(gram, "_ROWS", 4)
    monkeypatch.setattr(gram, "_BLOCK_BYTES", 300)


@pytest.fixture
def rng():
    return np.random.default_rng(1)


def normal(rng, dtype, *shape):
    x = rng.standard_normal(shape)
    return (x + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else x).astype(dtype)


def problem_of(a, b, **options):
    return GemmReduceProblem.build(Operand.of(a), Operand.of(b), **{"reduce": "sumsq"} | options)


@pytest.mark.parametrize("axis", [["m"], ["n"], ["n", "batch"]], ids=",".join)
@pytest.mark.parametrize("dtype", ["f2", "f4", "c8"])
def test_large_products_of_small_k(rng, dtype, axis, monkeypatch):
    a, b = normal(rng, dtype, 2, 3000, 8), normal(rng, dtype, 2, 8, 2000)
    problem = problem_of(a, b, axis=axis, alpha=2)
    monkeypatch.setattr("gemmserve_kernels.algorithms.cpu.gemm_reduce.Product", None)  # no product is formed
    found = gemm_reduce(a, b, reduce="sumsq", axis=axis, alpha=2)
    assert found.dtype == np.float32
    exact = oracle_gemm_reduce(problem, a, b)["sumsq"]
    assert (np.abs(found - exact) <= ROUNDED * exact).all()
    with pytest.raises(TypeError):
        gemm_reduce(a, b, reduce="sumsq", axis=axis, config=GemmConfig(algorithm="product"))


@pytest.mark.usefixtures("always")
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(products(with_c=False), st.sampled_from("mn"), st.booleans())
def test_every_kind_of_operand(drawn, axis, over_batch):
    options = drawn.options | {"axis": [axis, "batch"] if over_batch else [axis]}
    problem = problem_of(drawn.a, drawn.b, **options)
    exact = oracle_gemm_reduce(problem, drawn.a, drawn.b)["sumsq"]
    with np.errstate(all="ignore"):
        found = gram.sum_of_squares(problem, drawn.a, drawn.b)
    if found is None:  # 64-bit data, nothing to multiply, or a column that happens to cancel
        found = gemm_reduce(drawn.a, drawn.b, reduce="sumsq", **options)
        np.testing.assert_allclose(found, exact, rtol=0, atol=1e-5 * np.abs(exact).max(initial=0))
        return
    assert found.shape == exact.shape
    assert (np.abs(found - exact) <= ACCURACY * exact).all()


@pytest.mark.usefixtures("always")
def test_random_data_are_kept(rng):
    for shape in ((2, 9, 5), (300, 12)):
        a, b = normal(rng, "c8", *shape), normal(rng, "c8", shape[-1], 7)
        assert gram.sum_of_squares(problem_of(a, b), a, b) is not None


@pytest.mark.parametrize("dtype", ["f4", "c8"])
def test_cancellation_and_what_is_not_finite_are_left_to_the_product(rng, dtype):
    a, b = normal(rng, dtype, 3000, 8), normal(rng, dtype, 8, 2000)
    near, spoiled = a.copy(), a.copy()
    near[:, 1] = near[:, 0] * np.float32(1 + 2.0**-20)
    difference = b.copy()
    difference[:, 7] = 0
    difference[:2, 7] = 1, -1
    exact = oracle_gemm_reduce(problem_of(near, difference), near, difference)["sumsq"]
    assert gram.sum_of_squares(problem_of(near, difference), near, difference) is None
    assert (np.abs(gemm_reduce(near, difference, reduce="sumsq") - exact) <= 1e-5 * exact).all()
    spoiled[5, 3] = np.nan
    assert np.isnan(gemm_reduce(spoiled, b, reduce="sumsq")).all()


def test_an_infinity_that_meets_a_zero(rng):
    """It is NaN in one row of the product, where the form would be infinite as its squared sum is."""
    a, b = np.abs(normal(rng, "f4", 3000, 8)), np.abs(normal(rng, "f4", 8, 2000))
    a[5, 2], b[2, 3] = 0, np.inf
    assert np.flatnonzero(np.isnan(gemm_reduce(a, b, reduce="sumsq"))).tolist() == [3]


@pytest.mark.parametrize(
    "options",
    [
        {"reduce": ["sumsq", "sum"]},
        {"pre_op": "square"},
        {"return_c": True},
        {"compute": "fp32"},
        {"config": GemmConfig(algorithm="product")},
    ],
    ids=str,
)
def test_what_takes_the_product(rng, options):
    a, b = normal(rng, "f4", 3000, 8), normal(rng, "f4", 8, 2000)
    assert gram.sum_of_squares(problem_of(a, b), a, b) is not None
    assert gram.sum_of_squares(problem_of(a, b, **options), a, b) is None
    assert gram.sum_of_squares(problem_of(a[:100], b[:, :100]), a[:100], b[:, :100]) is None
    wide = a.astype("f8"), b.astype("f8")
    assert gram.sum_of_squares(problem_of(*wide), *wide) is None
