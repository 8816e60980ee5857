"""The promise of `auto`, element by element: as accurate as plain arithmetic on any data.

Every element is held to max(4 u, twice the vendor's worst) of (|A| |B|), or to the kind's own bound, on data of every
kind in `bench.kinds`, drawn anew at each run; a failure's message has the seed. 64 rows do not show what 8192 do.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from accuracy_cases import (
    DTYPES,
    HOSTILE,
    LARGE,
    SMALL,
    TOGETHER,
    element_bounds,
    fresh_seed,
    hold,
    hold_product,
    hold_reductions,
)

from gemmserve_kernels import ComputeUnsupported, ConfigInfeasible, GemmConfig, gemm, gemm_reduce, prepare
from gemmserve_kernels.bench.elementwise import elementwise
from gemmserve_kernels.bench.grades import grades
from gemmserve_kernels.bench.kinds import BY_WEIGHT, EXACT, most, operands
from gemmserve_kernels.problem.operand import real_dtype

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

NAMED = {
    "float32": ("6xbf16", "9xbf16", "ozaki", "fp32"),
    "complex64": ("6xbf16", "9xbf16", "ozaki", "fp32"),
    "float64": ("ozaki", "fp64"),
    "complex128": ("ozaki", "fp64"),
}
"""Modes of plain arithmetic's class that are asked for by name."""


def parts_of(dtype):
    return ("moduli", "parts") if np.dtype(dtype).kind == "c" else ("moduli",)


def size(dtype):
    return real_dtype(np.dtype(dtype)).itemsize


def cases(shapes):
    return [
        pytest.param(dtype, kind, shape, what, id=f"{dtype}-{kind}-{'x'.join(map(str, shape))}-{what}")
        for dtype in DTYPES
        for kind in BY_WEIGHT
        for shape in shapes(dtype)
        for what in parts_of(dtype)
    ]


@lru_cache(maxsize=4)
def measured(dtype, kind, shape, mode="auto"):
    m, n, k = shape
    rows, skipped = grades(cupy, kind, m=m, n=n, k=k, dtype=dtype, seed=fresh_seed(), modes=(mode,))
    return rows[0] if rows else skipped[mode]


def held(dtype, kind, shape, what, mode="auto"):
    row = measured(dtype, kind, shape, mode)
    if isinstance(row, str):
        pytest.skip(row)
    hold(row, what)


@pytest.fixture(autouse=True)
def _memory():
    """Panels of many shapes leave blocks that nothing else fits in."""
    yield
    pool = cupy.get_default_memory_pool()
    if pool.total_bytes() > 24 << 30:
        pool.free_all_blocks()


@pytest.mark.parametrize(("dtype", "kind", "shape", "what"), cases(lambda _: SMALL))
def test_every_kind_of_data(dtype, kind, shape, what):
    held(dtype, kind, shape, what)


@pytest.mark.parametrize(("dtype", "kind", "shape", "what"), cases(lambda dtype: LARGE[size(dtype)]))
def test_every_kind_of_data_large(dtype, kind, shape, what):
    held(dtype, kind, shape, what)


ISSUE = (
    ("float32", (8192, 8192, 256), "exp-6n"),
    ("float32", (4096, 4096, 512), "exp-6n"),
    ("float32", (8192, 8192, 256), "spikes"),
    ("complex64", (8192, 4096, 64), "exp-6n"),
    ("complex64", (8192, 4096, 128), "exp-6n"),
    ("complex128", (4096, 4096, 4096), "spikes"),
    ("complex128", (4096, 4096, 2048), "exp-3n"),
    ("complex128", (4096, 4096, 2048), "cauchy"),
    *((dtype, (n, n, n), kind) for dtype in ("complex64", "float32") for n in (1024, 4096) for kind in EXACT[:3:2]),
    ("complex64", (2048, 2048, 2048), "gate"),
    ("float64", (8192, 8192, 256), "spikes"),
    ("complex128", (8192, 8192, 128), "exp-6n"),
)
"""What was found wrong once."""


@pytest.mark.parametrize(("dtype", "shape", "kind"), ISSUE)
def test_what_was_wrong_once_large(dtype, shape, kind):
    for what in parts_of(dtype):
        held(dtype, kind, shape, what)


@pytest.mark.parametrize("kind", ["spikes", "exp-6n"])
@pytest.mark.parametrize(
    ("dtype", "mode"), [(dtype, mode) for dtype in DTYPES for mode in NAMED[dtype] if mode not in {"fp32", "fp64"}]
)
def test_modes_by_name_large(dtype, mode, kind):
    held(dtype, kind, (4096, 4096, 256), "moduli", mode)


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize(("dtype", "mode"), [(dtype, mode) for dtype in DTYPES for mode in NAMED[dtype]])
def test_modes_by_name(dtype, mode, kind):
    held(dtype, kind, (700, 515, 300), "moduli", mode)


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("mode", ["tf32", "1xtf32"])
def test_tf32_is_as_accurate_as_one_tf32_product(dtype, mode, kind):
    """Each factor is rounded to 11 bits, or cut: two units of 2**-10 at most."""
    seed = fresh_seed()
    a, b = operands(cupy, kind, 700, 515, 300, dtype, seed)
    try:
        d = gemm(a, b, compute=mode)
        rival = gemm(a, b, compute="tf32", config=GemmConfig(algorithm="vendor"))
    except (ComputeUnsupported, ConfigInfeasible) as reason:
        pytest.skip(str(reason))
    hold_product(cupy, a, b, d, (mode, kind, dtype, seed), least=2 * 2.0**-10 / 2.0**-24, rival=rival)


DOMINATED = ((1, 1024, 1024, 64), (200, 64, 64, 64), (1, 64, 8192, 8192), (1, 512, 512, 4096))


@pytest.mark.parametrize("shape", DOMINATED)
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_a_dominant_term_keeps_its_bound(dtype, shape):
    """The one kind with a bound of its own, by every way that `auto` has: planes, chunks, batches, skinny products."""
    batch, m, n, k = shape
    seed = fresh_seed()
    pairs = [operands(cupy, "dominant-term", m, n, k, dtype, seed + i) for i in range(batch)]
    a, b = (cupy.stack([pair[side] for pair in pairs]) for side in (0, 1))
    d, vendor = gemm(a, b), cupy.matmul(a, b)
    for i in range(batch):
        found = elementwise(cupy, a[i], b[i], {"ours": d[i], "vendor": vendor[i]})
        allowed = most("dominant-term", dtype, found["vendor"].modulus)
        assert found["ours"].modulus <= allowed, (dtype, shape, i, seed, found)


# ---- exactness


@pytest.mark.parametrize("shape", [(16, 16, 16), (100, 77, 100), (1024, 900, 1024), (2048, 2048, 2048)])
@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_nonzero_term_is_exact(dtype, kind, shape):
    m, n, k = shape
    if kind.endswith("right"):
        m, n = n, m
    seed = fresh_seed()
    a, b = operands(cupy, kind, m, n, k, dtype, seed)
    d = gemm(a, b)
    wrong = int((d != expected_exactly(kind, a, b)).sum())
    assert wrong == 0, f"{wrong} of {d.size} elements: {kind} {shape} {dtype}, seed {seed}"


def expected_exactly(kind, a, b):
    """The rows or columns that the ones pick."""
    if kind.endswith("right"):
        return a[:, abs(b).argmax(axis=0)]
    return b[abs(a).argmax(axis=1)]


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_large_permutations_are_exact(dtype):
    seed = fresh_seed()
    a, b = operands(cupy, "permutation", 8192, 8192, 8192, dtype, seed)
    assert bool((gemm(a, b) == expected_exactly("permutation", a, b)).all()), seed


# ---- other ways in


@pytest.mark.parametrize("trans", ["T", "C", "R"])
@pytest.mark.parametrize("kind", ["exp-6n", "spikes", "cauchy"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_transposed_and_conjugated_operands(dtype, kind, trans):
    seed = fresh_seed()
    a, b = operands(cupy, kind, 700, 515, 300, dtype, seed)
    stored = [cupy.ascontiguousarray(x.T if trans in "TC" else x) for x in (a, b)]
    stored = [x.conj() if trans in "CR" else x for x in stored]
    d = gemm(*stored, trans_a=trans, trans_b=trans)
    hold_product(cupy, a, b, d, (kind, dtype, trans, seed))


@pytest.mark.parametrize("shape", [(12, 9, 16), (70, 66, 130), (512, 512, 256)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_in_a_batch_do_not_matter(dtype, shape):
    """Each matrix of another kind, ordinary ones among them."""
    seed = fresh_seed()
    pairs = [operands(cupy, kind, *shape, dtype, seed + i) for i, kind in enumerate(HOSTILE)]
    a, b = (cupy.stack([pair[side] for pair in pairs]) for side in (0, 1))
    d, vendor = gemm(a, b), cupy.matmul(a, b)  # which cuts k of one small product, but not of a batch
    for i, kind in enumerate(HOSTILE):
        hold_product(cupy, a[i], b[i], d[i], (kind, dtype, shape, seed), rival=vendor[i])


@pytest.mark.parametrize("kind", ["normal", "exp-6n", "spikes"])
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_planar_operands(dtype, kind):
    seed = fresh_seed()
    a, b = operands(cupy, kind, 520, 300, 400, dtype, seed)
    d = gemm(*(cupy.stack([x.real, x.imag]) for x in (a, b)), layout="planar")
    joined = cupy.empty(d.shape[1:], dtype)
    joined.real, joined.imag = d[0], d[1]
    hold_product(cupy, a, b, joined, (kind, dtype, seed))


@pytest.mark.parametrize("kind", [*HOSTILE, "graded", "graded-heavy", "faint-imag"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_prepared_operands_give_the_same_bits(dtype, kind):
    seed = fresh_seed()
    for m, n, k in ((700, 515, 300), (2048, 1024, 256)):
        a, b = operands(cupy, kind, m, n, k, dtype, seed)
        plain = gemm(a, b).view(np.uint8)
        for left, right in ((prepare(a, "a"), b), (a, prepare(b, "b")), (prepare(a, "a"), prepare(b, "b"))):
            same = gemm(left, right).view(np.uint8) == plain
            assert bool(same.all()), f"{kind} {dtype} {(m, n, k)}, seed {seed}"


# ---- reductions


@pytest.mark.parametrize("axis", [("m",), ("n",), ("m", "batch")])
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions_are_as_near_as_the_elements(dtype, kind, axis):
    seed = fresh_seed()
    pairs = [operands(cupy, kind, 700, 515, 130, dtype, seed + i) for i in range(2)]
    check_reductions(pairs, axis, dtype, (kind, seed))


@pytest.mark.parametrize("kind", ["exp-6n", "spikes", "normal"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions_large(dtype, kind):
    seed = fresh_seed()
    pairs = [operands(cupy, kind, 8192 if size(dtype) == 4 else 4096, 2048, 128, dtype, seed)]
    for axis in (("m",), ("n",)):
        check_reductions(pairs, axis, dtype, (kind, seed))


def check_reductions(pairs, axis, dtype, about):
    a, b = (cupy.stack([pair[side] for pair in pairs]) for side in (0, 1))
    r, e = element_bounds(cupy, a, b)
    for names in TOGETHER[np.dtype(dtype).kind]:
        found = gemm_reduce(a, b, reduce=list(names), axis=list(axis))
        found = found if isinstance(found, dict) else {names[0]: found}
        hold_reductions(cupy, found, r, e, axis, dtype, (*about, axis, dtype, names))


# ---- what is not finite, and what is nearly nothing


@pytest.mark.parametrize("shape", [(20, 18, 30), (300, 270, 200), (1100, 900, 600)])
@pytest.mark.parametrize("kind", ["normal", "exp-6n", "spikes"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_have_the_class_of_plain_arithmetic(dtype, kind, shape):
    seed = fresh_seed()
    m, n, k = shape
    a, b = operands(cupy, kind, m, n, k, dtype, seed)
    a[m // 7, k // 3] = np.nan
    a[m // 2, k // 5] = np.inf
    a[m - 1, 0] = -np.inf
    b[k // 2, n // 3] = np.inf
    b[k // 5, n // 2] = -np.inf
    found = hold_product(cupy, a, b, gemm(a, b), (kind, dtype, shape, seed))
    assert found["ours"].odd >= 3 * n + 2 * (m - 3)


@pytest.mark.parametrize("kind", ["tiny", "subnormal", "huge", "zero-rows"])
@pytest.mark.parametrize("shape", [(20, 18, 30), (300, 270, 200), (2100, 1900, 600)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_ends_of_the_range(dtype, shape, kind):
    """Subnormal numbers are kept, in operands and in results; sums just below the largest number do not overflow."""
    held(dtype, kind, shape, "moduli")


@pytest.mark.parametrize("kind", ["exp-6n", "normal", "sparse-1"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_the_same_bits_again(dtype, kind):
    seed = fresh_seed()
    a, b = operands(cupy, kind, 1500, 1111, 400, dtype, seed)
    first, second = (gemm(a, b).view(np.uint8) for _ in range(2))
    assert bool((first == second).all()), seed
