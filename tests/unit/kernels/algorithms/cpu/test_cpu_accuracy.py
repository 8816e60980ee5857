"""The promise of `auto` on the CPU, element by element, on hostile data."""

from __future__ import annotations

import math

import numpy as np
import pytest
from accuracy_cases import (
    DTYPES,
    REDUCTIONS,
    element_bounds,
    fresh_seed,
    hold,
    hold_product,
    hold_reductions,
)
from hypothesis import given
from hypothesis import strategies as st

from gemmserve_kernels import gemm, gemm_reduce, prepare
from gemmserve_kernels.algorithms.cpu import gemm as cpu_gemm
from gemmserve_kernels.bench.elementwise import elementwise
from gemmserve_kernels.bench.grades import grades
from gemmserve_kernels.bench.kinds import EXACT, KINDS, operands

KIND = st.sampled_from(sorted(KINDS))
DTYPE = st.sampled_from(DTYPES)
EXTENT = st.sampled_from([1, 2, 3, 7, 16, 33, 65])
SEED = st.integers(0, 2**32 - 1)


def roundings(k, dtype):
    """gamma of a sum of k products in any order, in units of u; of complex moduli sqrt(2) times that of 2 k."""
    count = (2 * k + 1) * math.sqrt(2) if np.dtype(dtype).kind == "c" else k + 1
    return 1.01 * count


@given(kind=KIND, dtype=DTYPE, m=EXTENT, n=EXTENT, k=EXTENT, seed=SEED)
def test_products_of_every_kind(kind, dtype, m, n, k, seed):
    (row,), _ = grades(np, kind, m=m, n=n, k=k, dtype=dtype, seed=seed, modes=("auto",))
    hold(row)
    hold(row, "parts")
    assert row.error <= roundings(k, dtype)
    if kind in EXACT:
        assert row.error == 0


@given(
    kind=KIND,
    dtype=DTYPE,
    trans=st.tuples(st.sampled_from("NTCR"), st.sampled_from("NTCR")),
    block=st.sampled_from([1 << 25, 700]),
    seed=SEED,
)
def test_whatever_is_done_to_operands_first(kind, dtype, trans, block, seed):
    """Transposed, conjugated, planar, prepared, copied by blocks, two in a batch."""
    m, n, k = 17, 13, 30
    a, b = operands(np, kind, m, n, k, dtype, seed)
    stored = [turned(x, how) for x, how in zip((a, b), trans, strict=True)]
    options = {"trans_a": trans[0], "trans_b": trans[1]}
    before, cpu_gemm.BLOCK_BYTES = cpu_gemm.BLOCK_BYTES, block
    try:
        d = gemm(*stored, **options)
        prepared = gemm(prepare(stored[0], "a", trans=trans[0]), stored[1], **options)
        batch = gemm(np.stack([stored[0], stored[0]]), stored[1], **options)
    finally:
        cpu_gemm.BLOCK_BYTES = before
    np.testing.assert_array_equal(prepared, d)
    for each in (d, *batch):
        hold_product(np, a, b, each, (kind, dtype, trans, seed), least=roundings(k, dtype))
    if np.dtype(dtype).kind == "c":
        planar = gemm(*(np.stack([x.real, x.imag]) for x in stored), layout="planar", **options)
        hold_product(np, a, b, planar[0] + 1j * planar[1], (kind, dtype, trans, seed), least=roundings(k, dtype))


def turned(x, how):
    """What op makes `x` of."""
    x = np.ascontiguousarray(x.T) if how in "TC" else x
    return x.conj() if how in "CR" else x


@given(
    kind=KIND,
    dtype=DTYPE,
    axis=st.sampled_from([("m",), ("n",), ("m", "batch"), ("n", "batch")]),
    shape=st.sampled_from([(1, 1, 1), (31, 18, 25), (5, 90, 40), (120, 3, 9)]),
    seed=SEED,
)
def test_reductions_are_as_near_as_the_elements(kind, dtype, axis, shape, seed):
    pairs = [operands(np, kind, *shape, dtype, seed + i) for i in range(2)]
    a, b = (np.stack([pair[side] for pair in pairs]) for side in (0, 1))
    with np.errstate(over="ignore"):
        r, e = element_bounds(np, a, b)
        e = e + least_bound(a, b, shape[2])
        names = REDUCTIONS[np.dtype(dtype).kind]
        results = gemm_reduce(a, b, reduce=list(names), axis=list(axis))
        hold_reductions(np, results, r, e, axis, dtype, (kind, dtype, axis, shape, seed))


def least_bound(a, b, k):
    """The bound that holds for any order of summation, where the vendor's own error is by chance less."""
    unit = np.finfo(a.dtype).eps / 2
    return roundings(k, a.dtype) * unit * (np.abs(a).astype(float) @ np.abs(b).astype(float))


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("kind", ["normal", "exp-6n", "spikes", "cauchy", "pairs", "60-binades"])
def test_sums_of_squares_from_gram_matrices(kind, dtype):
    """Tall products, whose sums of squares are made without the product where its bound allows it."""
    seed = fresh_seed()
    a, b = operands(np, kind, 2048, 700, 16, dtype, seed)
    with np.errstate(over="ignore"):
        found = gemm_reduce(a, b, reduce="sumsq", axis="m")
        r, e = element_bounds(np, a[None], b[None])
        hold_reductions(np, {"sumsq": found[None]}, r, e, ("m",), dtype, (kind, dtype, seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "exp-6n", "spikes", "identity", "graded-heavy"])
def test_many_rows(kind, dtype):
    seed = fresh_seed()
    (row,), _ = grades(np, kind, m=3000, n=200, k=70, dtype=dtype, seed=seed, modes=("auto",))
    hold(row)
    hold(row, "parts")


@given(
    kind=st.sampled_from(["normal", "exp-6n", "tiny", "huge"]),
    dtype=DTYPE,
    seed=SEED,
    places=st.lists(
        st.tuples(st.integers(0, 8), st.integers(0, 10), st.sampled_from([np.nan, np.inf, -np.inf])), max_size=4
    ),
    other=st.lists(st.tuples(st.integers(0, 10), st.integers(0, 7), st.sampled_from([np.nan, np.inf])), max_size=2),
)
def test_what_is_not_finite(kind, dtype, seed, places, other):
    a, b = operands(np, kind, 9, 8, 11, dtype, seed)
    for x, spots in ((a, places), (b, other)):
        for i, j, value in spots:
            x[i, j] = value
    found = elementwise(np, a, b, {"d": gemm(a, b)})["d"]
    assert found.modulus <= roundings(11, dtype), (kind, dtype, seed, found)


@pytest.mark.parametrize("axis", [("m",), ("n",), ("m", "batch")])
@pytest.mark.parametrize("dtype", ["float32", "complex64", "float64"])
def test_what_is_held_to_would_find_what_is_wrong(dtype, axis):
    """One element that lost half of its digits, in a product and in what is made of it."""
    a, b = (np.stack([x, x]) for x in operands(np, "positive", 20, 15, 30, dtype, fresh_seed()))
    r, e = element_bounds(np, a, b)
    d = gemm(a, b)
    d[1, 3, 4] *= 1 + 100 * float(e[1, 3, 4] / np.abs(r[1, 3, 4]))
    with pytest.raises(AssertionError, match=r"at \(3, 4\)"):
        hold_product(np, a[1], b[1], d[1], "wrong")
    line = {("m",): 1, ("n",): 2}.get(axis, (0, 1))
    wrong = {"absmax": np.abs(d).max(axis=line), "sumsq": (np.abs(d.astype(complex)) ** 2).sum(axis=line) * 1.01}
    wrong["absmax"] = wrong["absmax"] * (1 + 1e-3)
    for name, result in wrong.items():
        with pytest.raises(AssertionError, match=name):
            hold_reductions(np, {name: result}, r, e, axis, dtype, "wrong")
    worst = np.abs(r).argmin(axis=line if isinstance(line, int) else 1)
    if "batch" not in axis:
        with pytest.raises(AssertionError, match="argmax"):
            hold_reductions(np, {"argmax": worst}, r, e, axis, dtype, "wrong")
