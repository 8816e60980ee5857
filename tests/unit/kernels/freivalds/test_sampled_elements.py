"""Elements computed again by NumPy and by the kernels on the CPU shim, against the products themselves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from freivalds_cases import build, rounded
from fresh_rng import fresh_rng
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled_cases import assert_elements, of_all, on, on_host, places
from simt_cases import ShimMachine, random, strided
from simt_shim.launcher import ShimLauncher

from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.freivalds import freivalds_check, sampled, sampled_device, sampled_host

ALPHA = {"alpha": 1.5 - 0.5j, "beta": -0.25 + 2j}
MACHINE = ShimMachine(ShimLauncher(KNOWN["A100"], checked=True))
DTYPES = ("float16", "float32", "float64", "complex64", "complex128")


@pytest.fixture(params=["host", "shim"])
def figures(request, monkeypatch):
    monkeypatch.setattr(sampled_device, "_MANY", 0)  # a warp to an element: threads of the shim cost
    return on_host if request.param == "host" else on(MACHINE)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_order(figures, dtype, order):
    how = "plain" if order == "C" else "fortran"
    a, b, c = (strided(random(i, dtype, *s), how) for i, s in enumerate([(37, 50), (50, 43), (37, 43)]))
    found = assert_elements(figures, a, b, c, alpha=1.5, beta=-0.5, order=order)
    assert 0 < found[0, 0] < 1


@pytest.mark.parametrize("trans_a", "NTCR")
@pytest.mark.parametrize("trans_b", "NTCR")
def test_operations(figures, trans_a, trans_b):
    a, b, c = random(1, "complex64", 24, 24), random(2, "complex64", 24, 24), random(3, "complex64", 24, 24)
    assert_elements(figures, a, b, c, trans_a=trans_a, trans_b=trans_b, **ALPHA)


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("how", ["reversed", "gaps", "offset", "padded", "constant rows"])
def test_strides(figures, dtype, how):
    a, b = strided(random(1, dtype, 3, 34, 21), how), strided(random(2, dtype, 21, 37), how)
    d = strided(rounded(build(a, b), a, b), how if how != "constant rows" else "gaps")
    assert_elements(figures, a, b, d=d)


def test_batches_and_broadcasting(figures):
    a, b, c = random(1, "float32", 3, 1, 20, 30), random(2, "float32", 2, 30, 13), random(3, "float32", 20, 1)
    assert_elements(figures, a, b, c, beta=2)
    assert_elements(figures, a, b, random(3, "float32", 2, 1, 13), beta=2)
    assert_elements(figures, a, b[0], random(3, "float32", 1, 1), beta=2)
    deep = random(1, "complex64", 2, 1, 3, 1, 2, 5, 6), random(2, "complex64", 2, 1, 3, 1, 6, 4)
    assert_elements(figures, *deep)
    assert_elements(figures, random(1, "float32", 2, 2, 2, 2, 2, 3, 4), random(2, "float32", 4, 5))
    assert_elements(figures, random(1, "float64", 20, 9, 40), random(2, "float64", 20, 40, 8))


def test_planar_and_mixed(figures):
    a, b, c = (random(i, "float32", 2, *s) for i, s in enumerate([(33, 40), (40, 21), (33, 21)]))
    assert_elements(figures, a, b, c, layout="planar", trans_a="R", **ALPHA)
    assert_elements(figures, random(1, "float32", 33, 40), random(2, "complex64", 40, 21), trans_b="R")
    assert_elements(figures, random(1, "float32", 33, 40), random(2, "float64", 40, 21))


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 70, 3), (70, 1, 40), (5, 4, 0), (1, 1, 0), (3, 5, 1)])
def test_edges(figures, m, n, k):
    a, b, c = random(1, "complex64", m, k), random(2, "complex64", k, n), random(3, "complex64", m, n)
    assert assert_elements(figures, a, b, c, **ALPHA)[0, 0] < 1
    if k == 0:
        assert assert_elements(figures, a, b)[0, 0] == 0


def test_more_rows_and_columns_than_are_looked_at(figures):
    """Candidates are spread over them, and a block's threads walk along k together."""
    assert_elements(figures, random(1, "float32", 4200, 3), random(2, "float32", 3, 2))
    assert_elements(figures, random(1, "float32", 2, 3), random(2, "float32", 3, 4200))
    assert_elements(figures, random(1, "complex64", 20, 700), random(2, "complex64", 700, 30))
    assert_elements(figures, random(1, "float64", 20, 700), random(2, "float64", 700, 30))


def test_norms_of_modes_that_promise_no_more(figures):
    a, b = random(1, "complex64", 30, 40), random(2, "complex64", 40, 20)
    strict = assert_elements(figures, a, b)
    loose = assert_elements(figures, a, b, compute="3xfp16-3m")
    assert loose[0, 0] < strict[0, 0]
    assert_elements(figures, a, b, compute="tf32")


def test_long_grids_and_large_batches_are_cut(monkeypatch):
    monkeypatch.setattr(sampled_device, "_WORKSPACE", 3000)
    launcher = ShimLauncher(KNOWN["A100"], max_grid=3)
    a, b = random(1, "complex64", 300, 4, 3), random(2, "complex64", 300, 3, 4)
    assert_elements(on(ShimMachine(launcher)), a[:7], b[:7])
    assert launcher.launches.count("sampled_worst") > 1
    assert_elements(on_host, a, b)


def test_waves_of_64():
    a, b = random(1, "complex64", 2, 40, 600), random(2, "complex64", 600, 50)
    machine = on(ShimMachine(ShimLauncher(KNOWN["MI300X"])))
    assert_elements(machine, a, b)
    assert_elements(machine, strided(a[..., :45], "fortran"), strided(b[:45], "fortran"))
    assert_elements(machine, random(1, "complex64", 20, 9, 40), random(2, "complex64", 20, 40, 8))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    m=st.integers(1, 5000),
    n=st.integers(1, 5000),
    k=st.integers(0, 40),
    batch=st.integers(1, 3),
)
def test_places_lie_in_the_matrix_and_are_spread_over_it(seed, m, n, k, batch):
    m, n = (m, min(n, 40)) if seed % 2 else (min(m, 40), n)
    a, b = np.ones((batch, m, k), "f2"), np.ones((k, n), "f2")
    problem = build(a, b)
    rows, columns = places(problem, a, b, np.ones((batch, m, n), "f2"), seed)
    choice = sampled.Choice.of(problem)
    half = choice.count // 2
    assert rows.shape == columns.shape == (batch, choice.count)
    assert rows.min() >= 0
    assert columns.min() >= 0
    assert rows.max() < m
    assert columns.max() < n
    for places_of, bits, extent in ((rows, choice.row_bits, m), (columns, choice.column_bits, n)):
        strata = 1 << bits
        for each in places_of[:, :half]:
            hit = np.zeros(extent, bool)
            hit[each] = True
            for s in range(strata):
                assert hit[extent * s // strata : -(-extent * (s + 1) // strata)].any()


def test_each_element_is_as_likely_as_any_other():
    """Where extents are no multiples of the strata, too: 3000 seeds, the count of each element within 6 sigma."""
    a, b = np.ones((5, 1), "f4"), np.ones((1, 7), "f4")
    choice = sampled.Choice.of(build(a, b))
    counts = np.zeros((5, 7))
    for seed in fresh_rng().integers(0, 2**63, 3000):
        rows, columns = choice.spread(int(seed))
        np.add.at(counts, (rows, columns), 1)
    expected = counts.sum() / counts.size
    assert np.abs(counts - expected).max() < 6 * math.sqrt(expected)


@given(x=st.integers(0, 2**64 - 1), extent=st.integers(1, 2**62))
def test_products_of_64_bits(x, extent):
    assert int(sampled._upper_half(np.array([x], np.uint64), extent)[0]) == x * extent >> 64


@given(
    x=st.floats(-1e100, 1e100).filter(lambda x: abs(x) > 1e-100 or x == 0),
    y=st.floats(-1e100, 1e100).filter(lambda y: abs(y) > 1e-100 or y == 0),
)
def test_nothing_is_lost_of_products_and_sums(x, y):
    from fractions import Fraction

    for of, exact in (
        (sampled_host.two_product, Fraction(x) * Fraction(y)),
        (sampled_host.two_sum, Fraction(x) + Fraction(y)),
    ):
        high, low = of(np.array([x]), np.array([y]))
        assert Fraction(float(high[0])) + Fraction(float(low[0])) == exact


# ---- what is found


def heavy(rng, *shape):
    return np.exp(6 * rng.standard_normal(shape)).astype("f4")


def truncated(x, axis):
    """What planes keep of float32: of elements below 2^-18 of their vector's largest, bits down to 2^-40 of it only."""
    x = x.astype(np.float64)
    largest = np.exp2(np.floor(np.log2(np.abs(x).max(axis=axis, keepdims=True))))
    step = largest * 2.0**-40
    return np.where(np.abs(x) < largest * 2.0**-18, np.trunc(x / step) * step, x)


def lossy(rng):
    """Heavy-tailed matrices, and their product as splits to 22 bits lose its small elements."""
    a, b = heavy(rng, 300, 128), heavy(rng, 128, 300)
    return a, b, (truncated(a, 1) @ truncated(b, 0)).astype("f4")


@pytest.mark.parametrize("number", range(5))
def test_norms_do_not_see_small_elements_that_are_lost_together(number):
    """Numbers from a seed: of fresh ones some six in a thousand lose an element that a norm sees."""
    a, b, d = lossy(np.random.default_rng(number))
    assert freivalds_check(build(a, b), a, b, None, d, number).excess < 1


@pytest.mark.parametrize("number", range(5))
def test_small_elements_that_are_lost_together_are_found(figures, number):
    """The failure of splits to 22 bits on heavy-tailed data, with fresh numbers every time."""
    rng = fresh_rng()
    a, b, d = lossy(rng)
    problem, seed = build(a, b), int(rng.integers(2**63))
    found = sampled.worst(figures(problem, a, b, None, d, seed))
    assert found.excess > 8
    assert found.error > 1e-5
    product, i, j = found.place
    assert product == 0
    exact = (a[i].astype("f8") * b[:, j]).sum()
    assert abs(d[i, j] - exact) / exact == pytest.approx(found.error, rel=1e-6)


def test_rows_and_columns_with_spikes_are_aimed_at(figures):
    """A few in ten thousand of the elements are wrong: chance alone would seldom find one."""
    rng = fresh_rng()
    seen = []
    for _ in range(4):
        a, b = (
            np.where(rng.random(shape) < 1e-4, 1e3, 1e-6 * rng.standard_normal(shape)).astype("f4")
            for shape in ((600, 256), (256, 600))
        )
        problem = build(a, b)
        d = (truncated(a, 1) @ truncated(b, 0)).astype("f4")
        seen.append(figures(problem, a, b, None, d, int(rng.integers(2**63)))[0, 0])
    assert max(seen) > 8, "each by itself nine times in ten"


@pytest.mark.parametrize("dtype", ["float32", "complex64", "float64", "complex128"])
def test_a_small_element_that_is_wrong_is_found_where_it_is_looked_at(figures, dtype):
    """Below its row's rounding, so that norms cannot see it: it is nothing beside the row, and all of itself."""
    rng = fresh_rng()
    a, b = (rng.standard_normal(s).astype(dtype) for s in ((40, 30), (30, 5000)))
    b[:, :4000] *= 1e-9 if dtype in {"float32", "complex64"} else 1e-18
    problem, seed = build(a, b), int(rng.integers(2**63))
    d = rounded(problem, a, b)
    rows, columns = places(problem, a, b, d, seed)
    at = next((i, j) for i, j in zip(rows[0], columns[0], strict=True) if j < 4000)
    d[at] *= 1.1
    # The seed aims by D: of those that are spread, places stay what they were.
    finding = freivalds_check(problem, a, b, None, d, seed)
    assert finding.excess < 1, "by norms"
    assert finding.element.excess > 8
    found = sampled.worst(figures(problem, a, b, None, d, seed))
    assert found.place == (0, int(at[0]), int(at[1]))
    assert found.excess == pytest.approx(finding.element.excess, rel=1e-6)


def test_an_element_that_is_not_looked_at_is_missed():
    """With the probability that the documentation says: a share p escapes (1 - p)^128 of the time at most."""
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((64, 8)).astype("f4"), rng.standard_normal((8, 64)).astype("f4")
    problem = build(a, b)
    right = rounded(problem, a, b)
    wrong = rng.random((64, 64)) < 0.005
    d = np.where(wrong, right * np.float32(1.001), right)
    missed = [figures_of[0, 0] < 8 for figures_of in (on_host(problem, a, b, None, d, s) for s in range(300))]
    allowed = (1 - wrong.mean()) ** 128
    assert np.mean(missed) < allowed + 4 * math.sqrt(allowed / 300)


def sequential(a, b):
    """Plain arithmetic at its worst: one term after another."""
    d = np.zeros((a.shape[0], b.shape[1]), np.result_type(a, b))
    for step in range(a.shape[1]):
        d = d + a[:, step : step + 1] * b[step : step + 1]
    return d


def kinds(rng, kind, dtype, *shape):
    x = rng.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        x = x + 1j * rng.standard_normal(shape)
    if kind == "heavy-tailed":
        x = np.exp((6 if dtype != "float16" else 0.5) * x)
    elif kind == "positive":
        x = np.abs(x.real) + (1j * np.abs(x.imag) if x.dtype.kind == "c" else 0)
    elif kind == "sparse":
        x = x * (rng.random(shape) < 0.03)
    elif kind == "graded":
        x = x * np.exp2(rng.uniform(-9, 9, (*shape[:-2], shape[-2], 1)) if dtype != "float16" else 1.0)
    return x.astype(dtype)


@pytest.mark.parametrize("kind", ["normal", "heavy-tailed", "positive", "sparse", "graded", "cancelling"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_arithmetic_is_in_no_doubt(dtype, kind):
    """Data of every kind, with fresh numbers: one term after another, as libraries do, and with rounded inputs."""
    rng = fresh_rng()
    for k in (1, 7, 300, 3000):
        a, b = kinds(rng, kind, dtype, 20, k), kinds(rng, kind, dtype, k, 30)
        if kind == "cancelling":
            a, b = np.concatenate([a, -a], axis=1), np.concatenate([b, b])
        wide = np.float32 if dtype == "float16" else dtype
        with np.errstate(all="ignore"):
            for d in (sequential(a.astype(wide), b.astype(wide)), a.astype(wide) @ b.astype(wide)):
                problem = build(a, b)
                found = freivalds_check(problem, a, b, None, d.astype(dtype), int(rng.integers(2**63)))
                assert found.element.excess < 2, (k, found)


@pytest.mark.parametrize("kind", ["normal", "heavy-tailed", "positive"])
def test_rounded_inputs_are_in_no_doubt_where_the_mode_rounds_them_and_in_doubt_where_it_does_not(kind):
    from gemmserve_kernels.numerics.models import round_tf32

    rng = np.random.default_rng(7)  # by chance one in thousands has fewer that differ much
    for k in (1, 40, 1000):
        a, b = kinds(rng, kind, "float32", 20, k), kinds(rng, kind, "float32", k, 30)
        for how in ("nearest", "toward_zero"):
            d = round_tf32(a, how) @ round_tf32(b, how)
            checked = (
                freivalds_check(build(a, b, compute=compute), a, b, None, d, int(rng.integers(2**63)))
                for compute in ("tf32", "auto")
            )
            right, wrong = (each.element.excess for each in checked)
            assert right < 2
            assert wrong > 8


# ---- what is not finite


@pytest.mark.parametrize("dtype", ["float32", "complex64", "complex128"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_result_that_is_not_finite_and_should_be(figures, dtype, value):
    a, b = random(1, dtype, 20, 30), random(2, dtype, 30, 25)
    problem = build(a, b)
    d = rounded(problem, a, b)
    d[3, 4] = value
    found = sampled.worst(figures(problem, a, b, None, d, 1))  # what is not finite is aimed at
    assert found == sampled.Element(math.inf, math.inf, (0, 3, 4))


@pytest.mark.parametrize("dtype", ["float32", "complex64", "float64"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_in_the_data_is_so_in_the_result(figures, dtype, value):
    a, b, c = random(1, dtype, 8, 30), random(2, dtype, 30, 9), random(3, dtype, 8, 9)
    a[3, 4], c[5, 6] = value, value
    problem = build(a, b, c, beta=1)
    with np.errstate(all="ignore"):
        d = (a @ b + c).astype(dtype)
    assert sampled.worst(figures(problem, a, b, c, d, 1)).excess < 1
    lost = d.copy()
    lost[3], lost[5, 6] = 1, 1
    assert sampled.worst(figures(problem, a, b, c, lost, 1)).excess == math.inf
    if dtype != "complex64" and value == np.inf:
        turned = d.copy()
        turned[3] *= -1
        assert sampled.worst(figures(problem, a, b, c, turned, 1)).excess == math.inf


@pytest.mark.parametrize(("dtype", "scale"), [("float16", 200), ("float32", 1e20), ("complex64", 1e20)])
def test_overflow_is_no_error(figures, dtype, scale):
    """Also where single sums stay finite: of those something can be said."""
    a, b = random(1, dtype, 20, 30, scale=scale), random(2, dtype, 30, 25, scale=scale)
    problem = build(a, b)
    found = sampled.worst(figures(problem, a, b, None, rounded(problem, a, b), 1))
    assert not found.excess > 1
    all_lost = np.full((20, 25), np.inf, dtype)
    assert not sampled.worst(figures(problem, a, b, None, all_lost, 1)).excess > 8


def test_nothing_can_be_said(figures):
    a, b = random(1, "float64", 4, 5, scale=1e300), random(2, "float64", 5, 4, scale=1e300)
    found = sampled.worst(figures(build(a, b), a, b, None, np.full((4, 4), np.nan), 1))
    assert math.isnan(found.excess)
    assert found.place is None


def test_c_is_not_read_where_beta_is_zero(figures):
    a, b, c = random(1, "float32", 9, 10), random(2, "float32", 10, 8), np.full((9, 8), np.nan, "f4")
    problem = build(a, b, c, beta=0)
    assert sampled.worst(figures(problem, a, b, c, rounded(problem, a, b), 1)).excess < 1


def test_tiny_numbers_have_an_absolute_error(figures):
    for scale in (1e-20, 1e-21, 1e-22):
        a, b = random(1, "float32", 20, 30, scale=scale), random(2, "float32", 30, 25, scale=1e-20)
        assert assert_elements(figures, a, b)[0, 0] < 1


def test_a_zero_that_should_be_zero(figures):
    """Elements without a term: exact, and whatever is not 0 there is wrong."""
    a, b = random(1, "float32", 20, 30), random(2, "float32", 30, 25)
    a[:, ::2], b[1::2] = 0, 0
    problem, d = build(a, b), np.zeros((20, 25), "f4")
    assert sampled.worst(figures(problem, a, b, None, d, 1)).excess == 0
    d[7] = 1e-20
    found = sampled.worst(figures(problem, a, b, None, d, 1))
    assert found.excess > 1e6
    assert found.place[:2] == (0, 7)


def test_the_worst_of_many_products():
    rng = fresh_rng()
    a, b = random(1, "complex64", 500, 4, 4), random(2, "complex64", 500, 4, 4)
    problem = build(a, b)
    d = rounded(problem, a, b)
    d[321] *= 1.01
    found = freivalds_check(problem, a, b, None, d, int(rng.integers(2**63))).element
    assert found.excess > 8
    assert found.place[0] == 321
    assert of_all(problem, a, b, None, d)[found.place] == pytest.approx(found.excess, rel=1e-6)
