"""Freivalds' check by NumPy and by the kernels on the CPU shim, against the products themselves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from freivalds_cases import assert_figures, build, on, on_host, rounded
from simt_cases import ShimMachine, random, strided
from simt_shim.launcher import ShimLauncher

from gemmserve_kernels.device.spec import KNOWN
from gemmserve_kernels.freivalds import device, finding, freivalds_check, host, sampled, sampled_host
from gemmserve_kernels.freivalds import signs as signs_module
from gemmserve_kernels.freivalds.signs import signs

ALPHA = {"alpha": 1.5 - 0.5j, "beta": -0.25 + 2j}
MACHINE = ShimMachine(ShimLauncher(KNOWN["A100"], checked=True))


@pytest.fixture(params=["host", "shim"])
def figures(request):
    return on_host if request.param == "host" else on(MACHINE)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
def test_every_dtype_and_order(figures, dtype, order):
    how = "plain" if order == "C" else "fortran"
    a, b, c = (strided(random(i, dtype, *s), how) for i, s in enumerate([(37, 50), (50, 43), (37, 43)]))
    found = assert_figures(figures, a, b, c, alpha=1.5, beta=-0.5, order=order)
    assert 0 < found.excess < 1


@pytest.mark.parametrize("trans_a", "NTCR")
@pytest.mark.parametrize("trans_b", "NTCR")
def test_operations(figures, trans_a, trans_b):
    a, b, c = random(1, "complex64", 24, 24), random(2, "complex64", 24, 24), random(3, "complex64", 24, 24)
    found = assert_figures(figures, a, b, c, trans_a=trans_a, trans_b=trans_b, **ALPHA)
    assert found.excess < 1


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("how", ["reversed", "gaps", "offset", "padded", "constant rows"])
def test_strides(figures, dtype, how):
    a, b = strided(random(1, dtype, 3, 34, 21), how), strided(random(2, dtype, 21, 37), how)
    d = strided(rounded(build(a, b), a, b), how if how != "constant rows" else "gaps")
    assert_figures(figures, a, b, d=d)


def test_batches_and_broadcasting(figures):
    a, b, c = random(1, "float32", 3, 1, 20, 30), random(2, "float32", 2, 30, 13), random(3, "float32", 20, 1)
    assert_figures(figures, a, b, c, beta=2)
    assert_figures(figures, a, b, random(3, "float32", 2, 1, 13), beta=2)
    assert_figures(figures, a, b[0], random(3, "float32", 1, 1), beta=2)
    deep = random(1, "complex64", 2, 1, 3, 1, 2, 5, 6), random(2, "complex64", 2, 1, 3, 1, 6, 4)
    assert_figures(figures, *deep)
    assert_figures(figures, random(1, "float32", 2, 2, 2, 2, 2, 3, 4), random(2, "float32", 4, 5))


def test_planar_and_mixed(figures):
    a, b, c = (random(i, "float32", 2, *s) for i, s in enumerate([(33, 40), (40, 21), (33, 21)]))
    assert_figures(figures, a, b, c, layout="planar", trans_a="R", **ALPHA)
    assert_figures(figures, random(1, "float32", 33, 40), random(2, "complex64", 40, 21), trans_b="R")


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (1, 70, 3), (70, 1, 40), (5, 4, 0), (1, 1, 0), (3, 5, 1)])
def test_edges(figures, m, n, k):
    a, b, c = random(1, "complex64", m, k), random(2, "complex64", k, n), random(3, "complex64", m, n)
    found = assert_figures(figures, a, b, c, **ALPHA)
    assert found.excess < 1
    if k == 0:
        assert_figures(figures, a, b)


@pytest.mark.parametrize(("m", "n"), [(0, 3), (3, 0), (0, 0)])
def test_nothing(m, n):
    a, b = np.zeros((m, 4)), np.zeros((4, n))
    assert freivalds_check(build(a, b), a, b, None, np.zeros((m, n)), 1) == finding.Finding(0, 0)


def test_several_parts_of_rows_and_blocks_of_a_verdict(figures):
    """More than one block takes along each axis, whether elements are neighbours along it or across it."""
    a, b = random(1, "float32", 300, 700), random(2, "float32", 700, 600)
    assert_figures(figures, a, b)
    assert_figures(figures, np.asfortranarray(a), np.asfortranarray(b), order="F")


@pytest.mark.parametrize("number", range(3))
def test_one_wrong_element_is_found(figures, number):
    """Also where it is one of many products, and small beside most of the others."""
    rng = np.random.default_rng(number)
    a, b = random(1, "complex64", 4, 60, 30), random(2, "complex64", 30, 50)
    a[:2] *= 1e4
    problem = build(a, b)
    d = rounded(problem, a, b)
    at = (int(rng.integers(2, 4)), int(rng.integers(60)), int(rng.integers(50)))
    d[at] += 0.01 * np.abs(d[at])
    found = finding.judged(problem, figures(problem, a, b, None, d, number))
    assert found.excess > 8
    assert found.residual < 1e-6, "as a share of all it is nothing"


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_result_that_is_not_finite_and_should_be(figures, dtype, value):
    a, b = random(1, dtype, 20, 30), random(2, dtype, 30, 25)
    problem = build(a, b)
    d = rounded(problem, a, b)
    d[3, 4] = value
    found = finding.judged(problem, figures(problem, a, b, None, d, 1))
    assert (found.residual, found.excess) == (math.inf, math.inf)


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("where", "abc")
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_data_that_are_not_finite_cannot_be_judged(figures, dtype, where, value):
    operands = {"a": random(1, dtype, 2, 20, 30), "b": random(2, dtype, 2, 30, 25), "c": random(3, dtype, 2, 20, 25)}
    problem = build(*operands.values(), beta=1)
    operands[where][0, 3, 4] = value
    d = rounded(problem, *operands.values())
    every = figures(problem, *operands.values(), d, 1)
    assert np.isnan(every[0, :, 2]).any()
    found = finding.judged(problem, every)
    assert found.excess < 1, "the second of them can"
    alone = finding.judged(problem, every[:1])
    assert math.isnan(alone.residual)
    assert math.isnan(alone.excess)


def test_c_is_not_read_where_beta_is_zero(figures):
    a, b = random(1, "float32", 9, 10), random(2, "float32", 10, 8)
    problem = build(a, b, np.full((9, 8), np.nan, "f4"), beta=0)
    d = rounded(problem, a, b)
    assert finding.judged(problem, figures(problem, a, b, np.full((9, 8), np.nan, "f4"), d, 1)).excess < 1


def test_tiny_numbers_have_an_absolute_error(figures):
    """A result of subnormal numbers, and one that is zero because it would be smaller still."""
    for scale in (1e-20, 1e-21, 1e-22):
        a, b = random(1, "float32", 20, 30, scale=scale), random(2, "float32", 30, 25, scale=1e-20)
        found = assert_figures(figures, a, b)
        assert found.excess < 1


def test_small_float16_results_are_judged(figures):
    a, b = random(1, "float16", 64, 64, scale=0.004), random(2, "float16", 64, 64, scale=0.004)
    d = rounded(build(a, b), a, b)
    assert assert_figures(figures, a, b, d=d).excess < 1
    d = d.copy()
    d[5, 7] += np.float16(1e-3)
    assert assert_figures(figures, a, b, d=d).excess > 8


def test_cancellation_is_no_excess(figures):
    """The product is all rounding: the residual says so, and it is no sign of anything."""
    left, right = random(1, "float32", 30, 20), random(2, "float32", 20, 25)
    a, b = np.concatenate([left, -left], axis=1), np.concatenate([right, right * np.float32(1 + 1e-6)])
    problem = build(a, b)
    d = np.zeros((30, 25), "f4")
    for i in range(40):
        d += a[:, i : i + 1] * b[i : i + 1]
    found = finding.judged(problem, figures(problem, a, b, None, d, 3))
    assert found.residual > 1e-2
    assert found.excess < 1


def test_long_grids_and_large_batches_are_cut(monkeypatch):
    monkeypatch.setattr(device, "_WORKSPACE", 40_000)
    launcher = ShimLauncher(KNOWN["A100"], max_grid=3)
    cut = on(ShimMachine(launcher))
    a, b = random(1, "complex64", 7, 20, 33), random(2, "complex64", 7, 33, 40)
    assert_figures(cut, a, b)
    assert launcher.launches.count("freivalds_judge") > 1
    assert_figures(cut, a, b[0])


def test_waves_of_64():
    a, b = random(1, "complex64", 2, 40, 45), random(2, "complex64", 45, 50)
    machine = on(ShimMachine(ShimLauncher(KNOWN["MI300X"])))
    assert_figures(machine, a, b)
    assert_figures(machine, strided(a, "fortran"), strided(b, "fortran"))


def test_signs_are_the_published_generator_s():
    """The first three numbers of SplitMix64 from the state 1234567, as its test vectors have them."""
    numbers = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    expected = [[-1.0 if number >> bit & 1 else 1.0 for bit in range(4)] for number in numbers]
    np.testing.assert_array_equal(signs(1234567, 3), expected)
    many = signs(5, 4096)
    assert np.abs(many.mean(0)).max() < 0.1
    assert np.abs(many.T @ many / 4096 - np.eye(4)).max() < 0.1


@pytest.mark.parametrize("compute", ["auto", "3xfp16-3m"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_cut_into_any_pieces_it_finds_the_same(dtype, compute, monkeypatch):
    if compute == "3xfp16-3m" and dtype != "complex64":
        compute = "auto"
    cases = [
        (random(1, dtype, 3, 1, 20, 30), random(2, dtype, 2, 30, 13), random(3, dtype, 20, 1), {"beta": 2}),
        (random(1, dtype, 2, 1, 5, 6), random(2, dtype, 3, 6, 4), random(3, dtype, 2, 3, 5, 4), ALPHA),
        (random(1, dtype, 30, 41), random(2, dtype, 11, 30), None, {"trans_a": "T", "trans_b": "C"}),
        (random(1, dtype, 40, 1), random(2, dtype, 1, 2), None, {}),
        (random(1, dtype, 2, 0), random(2, dtype, 0, 3), random(3, dtype, 2, 3), {"beta": 1}),
    ]
    if dtype in {"float32", "float64"}:
        cases = [(*case[:3], {"beta": 2} if case[3] is ALPHA else case[3]) for case in cases]

    def findings():
        for a, b, c, options in cases:
            problem = build(a, b, c, compute=compute, **options)
            d = rounded(problem, a, b, c)
            d[..., -1, -1] += 1
            yield freivalds_check(problem, a, b, c, d, seed=3)

    whole = list(findings())
    monkeypatch.setattr(host, "_PANEL", 7)
    monkeypatch.setattr(host, "_ROWS", 3)
    monkeypatch.setattr(sampled_host, "_TOGETHER", 5)
    for module, together in ((finding, 2), (sampled, 2), (signs_module, 4)):
        monkeypatch.setattr(module, "_TOGETHER", together)
    for one, other in zip(whole, findings(), strict=True):
        assert one.excess > 100
        assert one.element.place == other.element.place
        np.testing.assert_allclose(
            [one.residual, one.excess, one.element.excess, one.element.error],
            [other.residual, other.excess, other.element.excess, other.element.error],
            rtol=1e-6,
        )
